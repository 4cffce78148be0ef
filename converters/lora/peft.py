"""Adapter folders as PEFT has them, in both directions: names, config and values.

Torch's matrix may be several linear maps of ours. Where their adapters share one A, as
those that came from PEFT do, the folder holds that A and their B one below the other.
Where each has learned its own, the folder holds them side by side as one adapter of
their ranks' sum (see `dew.converters.lora.peft_layout`): the same function, at the
same scale.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dew.converters.errors import brief
from dew.converters.folder.atomic import staged
from dew.converters.folder.fetch import HUB_ID
from dew.converters.folder.safetensors import Spec, read_header, write_file
from dew.converters.folder.weights import Weights, unreadable
from dew.converters.lora.adapters import (
    Adapted,
    Chosen,
    adapted,
    choose,
    module_of,
    torch_table,
)
from dew.converters.lora.config import Lora, matches
from dew.converters.lora.peft_config import CONFIG, read_config
from dew.converters.lora.peft_layout import form_of, is_transposed, joined, split
from dew.converters.mapping.table import Table
from dew.converters.pretrained import Pretrained
from dew.converters.save import on_host
from dew.nn.lora import adapter_leaves
from dew.tree import flatten, unflatten
from dew.typing import Path, Variables

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


READ_AS_EXPERTS = ("deepseek_v2", "deepseek_v3", "qwen3_moe")
"""Models of which PEFT (0.21) takes any target named as below for stacked experts."""

EXPERTS = ("gate_proj", "up_proj", "down_proj")

TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
"""PEFT's task by the end of an architecture's name; others are left open."""


def is_adapter(folder: FilePath) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def base_address(folder: FilePath) -> str:
    """The address of the model that an adapter is for.

    Raises:
        ValueError: its config names none.
    """
    config = _config_of(folder)
    name, revision = (config.get(k) for k in ("base_model_name_or_path", "revision"))
    if not name:
        raise ValueError(
            f"{folder / CONFIG} has no base_model_name_or_path; load the base and give "
            "it: dew.load(FOLDER, base=…)"
        )
    return f"{name}@{revision}" if revision else name


def load_adapter(
    folder: FilePath, address: str, base: Pretrained, *, dtype: Any = None
) -> Adapted:
    """Reads an adapter's folder over a base that has been loaded.

    Raises:
        ValueError: a field of its config, a target or a tensor that is not accounted
            for.
    """
    config = _config_of(folder)
    lora = read_config(config, address)
    chosen = choose(base, lora)
    form = Form(base=base, chosen=chosen)
    tied = bool(config.get("ensure_weight_tying"))
    weights = _weights(folder)
    _check(form, weights, address, tied=tied)
    leaves = flatten(base.variables) | form.leaves(weights)
    if dtype is not None:
        leaves |= {
            path: leaf.astype(dtype)
            for path, leaf in leaves.items()
            if path[0] == "params" and leaf.dtype != dtype
        }
    return adapted(
        base,
        lora,
        chosen,
        unflatten(leaves),
        folder=replace(base.folder, path=folder, address=address, weights=weights),
    )


def save_adapter(
    source: Adapted,
    folder: str | os.PathLike[str],
    variables: Variables,
    *,
    overwrite: bool = False,
    check: Any = None,
) -> FilePath:
    """Writes the adapter alone, as a folder that `peft.PeftModel` loads over the base.

    Under several processes all of them call it, and the first writes.

    Raises:
        ValueError: the base is no folder that torch would read as we did, or PEFT
            would read a module as another.
    """
    ties = source.base.ties
    if ties.edits or ties.dropped or ties.borrowed:
        raise ValueError(
            f"{source.base.address} was read with tied=…, so no folder holds the "
            "adapter's base; save the base, load that, and adapt it, or merge"
        )
    lost = [name for name in source.parts if matches(EXPERTS, name)]
    if lost and source.config.get("model_type") in READ_AS_EXPERTS:
        raise ValueError(
            f"PEFT would read {', '.join(brief(lost))} as its experts; leave them out "
            "(exclude=…), or write the whole model (merge=True, --merge)"
        )
    form = Form(base=source.base, chosen=source.chosen)
    # What is beside the base's own rows and layers is no part of a folder.
    _, variables = source.base.plain(variables)
    tensors = form.tensors(variables)
    target = FilePath(folder).expanduser().absolute()
    if jax.process_index() == 0:
        with staged(target, overwrite=overwrite) as partial:
            specs = [
                Spec(name=name, dtype=array.dtype, shape=array.shape)
                for name, array in tensors.items()
            ]
            file = partial / WEIGHTS
            write_file(
                file, specs, tensors.__getitem__, {"format": "pt"}, lambda name: None
            )
            config = {**_fixed(source), **form.config(source.lora, tensors)}
            text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
            (partial / CONFIG).write_text(text + "\n", encoding="utf-8")
            if check is not None:
                check(partial)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("dew.save_adapter")
    return target


def _fixed(source: Adapted) -> dict[str, Any]:
    """What the config says whatever was adapted."""
    folder = source.base.folder
    address, _, revision = folder.address.removeprefix("hf://").partition("@")
    is_hub = bool(HUB_ID.fullmatch(address)) and not FilePath(address).exists()
    named = source.config.get("architectures") or [""]
    tasks = [task for end, task in TASKS.items() if named[0].endswith(end)]
    return {
        "base_model_name_or_path": address if is_hub else str(folder.path),
        "revision": revision or None if is_hub else None,
        "task_type": tasks[0] if tasks else None,
        "peft_type": "LORA",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": source.lora.dropout,
        "use_dora": False,
        "use_rslora": source.lora.rslora,
    }


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one adapter lies in a folder: names, shapes, and the way to and from ours."""

    base: Pretrained
    chosen: Chosen

    @cached_property
    def table(self) -> Table:
        """The base's tensors under the names of torch's modules."""
        return torch_table(self.base)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a folder whose matrices each have one A."""
        found = {}
        for module, parts in self.chosen.parts.items():
            shapes = form_of(parts[0], parts[0].adapter.rank)
            found |= dict(zip(_names(module), shapes, strict=True))
        whole = {PREFIX + name: self.table.shapes[name] for name in self.chosen.saved}
        return found | whole

    def leaves(self, weights: Weights) -> dict[Path, Any]:
        """The adapter's variables, read."""
        found: dict[Path, Any] = {}
        for module, parts in self.chosen.parts.items():
            a, b = (weights.view(name) for name in _names(module))
            for part in parts:
                values = (jnp.asarray(x) for x in split(part, a, b))
                found |= adapter_leaves(part.adapter, *values)
        for name in self.chosen.saved:
            for piece in self.table.sources[name]:
                stored = weights.view(PREFIX + name)
                found[piece.target] = jnp.asarray(piece.read(stored))
        return found

    def tensors(self, variables: Variables) -> dict[str, np.ndarray]:
        """The folder's tensors."""
        leaves = flatten(variables)
        found = {}
        for module, parts in self.chosen.parts.items():
            found |= dict(zip(_names(module), joined(parts, leaves), strict=True))
        for name in self.chosen.saved:
            found[PREFIX + name] = self.table.write(
                name, lambda piece: on_host(leaves[piece.target])
            )
        return found

    def config(self, lora: Lora, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """What the config says of the modules, their ranks and their scales."""
        ranks = {m: len(tensors[_names(m)[0]]) for m in self.chosen.parts}
        alphas = {}
        for module, rank in ranks.items():
            wider = rank // lora.rank_of(module)
            alphas[module] = _plain(
                lora.alpha_of(module) * (wider**0.5 if lora.rslora else wider)
            )
        modules = {module_of(name) for name in self.table.sources}
        whole = {module_of(name) for name in self.chosen.saved}
        parts = [part for parts in self.chosen.parts.values() for part in parts]
        tied = bool(self.table.copies & {*self.chosen.saved})
        return {
            "r": lora.rank,
            "lora_alpha": _plain(lora.alpha),
            "rank_pattern": _patterns(ranks, lora.rank),
            "alpha_pattern": _patterns(alphas, lora.alpha),
            "target_modules": ends(set(self.chosen.parts), modules),
            "modules_to_save": ends(whole, modules) or None,
            "fan_in_fan_out": all(is_transposed(part) for part in parts),
            **({"ensure_weight_tying": True} if tied else {}),
        }


def _names(module: str) -> tuple[str, str]:
    """What A and B of a torch module are called in a folder."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def ends(chosen: set[str], every: set[str]) -> list[str]:
    """The shortest ends of names that mean `chosen` and no other of `every`."""
    found = set()
    for name in chosen:
        parts = name.split(".")
        for i in range(len(parts) - 1, -1, -1):
            end = ".".join(parts[i:])
            if {n for n in every if n == end or n.endswith(f".{end}")} <= chosen:
                found.add(end)
                break
    return sorted(found)


def _plain(number: float) -> float | int:
    """A whole number as PEFT writes it."""
    return int(number) if number == int(number) else number


def _patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Values other than the default, by ends of the names of their modules."""
    others = {value for value in values.values() if value != default}
    return {
        end: value
        for value in others
        for end in ends({n for n, v in values.items() if v == value}, {*values})
    }


def _config_of(folder: FilePath) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text(encoding="utf-8"))


def _weights(folder: FilePath) -> Weights:
    """The tensors of an adapter's folder.

    Raises:
        ValueError: it has none in safetensors.
    """
    file = folder / WEIGHTS
    if not file.exists():
        held = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise ValueError(
            f"{folder} has no {WEIGHTS}; it holds {held}. Load a pickled adapter in "
            "PEFT and save it anew, which writes safetensors"
        )
    header = read_header(file)
    return Weights(
        entries={entry.name: entry for entry in header.entries},
        metadata={WEIGHTS: header.metadata},
        faults=header.faults,
    )


def _check(form: Form, weights: Weights, address: str, *, tied: bool) -> None:
    """Raises all that is wrong with an adapter's tensors at once."""
    wanted, found = form.shapes(), weights.shapes()
    lost = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    faults = [
        *weights.faults,
        *(f"missing: {line}" for line in brief(lost)),
        *(f"unexpected: {line}" for line in brief(extra, near=lost or [*wanted])),
        *(
            f"mis-shaped: {name} is {list(found[name])}, and should be {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ),
        *unreadable(weights, [name for name in wanted if name in found]),
    ]
    copies = form.table.copies & {*form.chosen.saved}
    if copies and not tied:
        faults.append(
            f"it trains the table that {', '.join(copies)} repeats without "
            "ensure_weight_tying, so torch has two tables where the base has one; "
            "merge it in PEFT and load that"
        )
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise ValueError(f"the adapter {address} does not fit its base:{listed}")
