"""Builds transformers models without weights, on the meta device."""

import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import transformers
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from dew.bridges.lowering.errors import LoweringError
from dew.bridges.lowering.lock import TRACING
from dew.bridges.names import untrained_names

_UNSET = -77
"""The value of integer tables until the module's own initialisation sets them."""


def meta_module(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    stored: Collection[str],
) -> PreTrainedModel:
    """Builds a module whose weights have no storage, but with recomputed buffers.

    These are the buffers that torch does not save, and the fixed tables that `stored`
    lacks and transformers does not miss, for example Marian's positions.

    Raises:
        LoweringError: such a table is not computed when the module initialises.
    """
    with TRACING, _default_dtype(dtype), _weightless():
        module = kind(config).eval()
        unset = _recompute(module, stored)
    if unset:
        raise LoweringError(
            f"{kind.__name__} does not recompute {', '.join(unset)}, which are not in "
            "the folder; load it with transformers, and call dew.bridges.lower"
        )
    return module


@contextmanager
def _weightless() -> Iterator[None]:
    """Moves each parameter that this thread registers to the meta device at once."""
    thread = threading.get_ident()

    def to_meta(_: torch.nn.Module, __: str, weight: torch.nn.Parameter | None) -> Any:
        # A tied weight is registered again, and must stay the same object.
        if weight is None or weight.is_meta or threading.get_ident() != thread:
            return None
        return torch.nn.Parameter(weight.to("meta"), weight.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()


def _recompute(module: Any, stored: Collection[str]) -> list[str]:
    """Computes the fixed weights that `stored` may lack; returns those it cannot.

    They become buffers that are not saved.
    """
    not_missed = module._keys_to_ignore_on_load_missing or ()
    never_saved = module._keys_to_ignore_on_save or ()
    held = module.state_dict(keep_vars=True)
    may_lack = [
        name
        for name in sorted(untrained_names(module) & held.keys())
        if name in never_saved or any(re.search(p, name) for p in not_missed)
    ]
    spelled = stored_names(module) if may_lack else {}
    absent: dict[str, list[str]] = {}
    for name in may_lack:
        if not set(spelled[name]) & set(stored):
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            delattr(owner, last)
            owner.register_buffer(last, _unset_buffer(held[name]), persistent=False)
            absent.setdefault(path, []).append(name)
    for path in absent:
        _enclosing_model(module, path)._init_weights(module.get_submodule(path))
    names = chain.from_iterable(absent.values())
    return [name for name in names if _is_unset(module.get_buffer(name))]


def _enclosing_model(module: Any, path: str) -> Any:
    """Returns the innermost model around a submodule, whose `_init_weights` sets it."""
    models = [
        (len(name), model)
        for name, model in module.named_modules()
        if isinstance(model, transformers.PreTrainedModel)
        and (not name or f"{path}.".startswith(f"{name}."))
    ]
    return max(models, key=lambda named: named[0])[1]


def _unset_buffer(buffer: torch.Tensor) -> torch.Tensor:
    unset = float("nan") if buffer.is_floating_point() else _UNSET
    return torch.full(buffer.shape, unset, dtype=buffer.dtype, device="cpu")


def _is_unset(buffer: torch.Tensor) -> bool:
    unset = buffer.isnan() if buffer.is_floating_point() else buffer == _UNSET
    return bool(unset.any())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Makes modules in this dtype, as transformers does for a checkpoint of it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def stored_names(module: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Returns the names that each weight may have in files.

    Transformers renames some as it saves, and a folder of the base model lacks the
    prefix that one of a model with a head has.
    """
    prefix = f"{module.base_model_prefix}."
    held = dict(module.state_dict(keep_vars=True))
    # Converted weights are other tensors than the module's; renamed ones are the same.
    renamed = {
        id(tensor): name
        for name, tensor in revert_weight_conversion(module, held).items()
    }
    spelled = {}
    for name, tensor in held.items():
        both = (name, renamed.get(id(tensor), name))
        around = [(n, n.removeprefix(prefix), prefix + n) for n in both]
        spelled[name] = tuple(dict.fromkeys(sum(around, ())))
    return spelled
