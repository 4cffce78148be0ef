"""Reads and writes PEFT's adapter folders: names, config and values.

One matrix of torch's may be several linear maps here. Where their adapters share one A,
as those read from PEFT do, the folder holds that A, and their B stacked along the rows.
Where each has an A of its own, the folder holds one adapter whose rank is the sum of
their ranks (`dew.converters.lora.peft_layout`): the same function at the same scale.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from dew.converters.errors import brief
from dew.converters.folder.atomic import write_atomically
from dew.converters.folder.fetch import HUB_ID
from dew.converters.folder.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Folder,
)
from dew.converters.folder.safetensors import write_arrays
from dew.converters.folder.weights import Weights, unreadable
from dew.converters.lora.adapters import (
    Adapted,
    Trained,
    attach,
    find_trained,
    module_of,
    torch_table,
)
from dew.converters.lora.config import Lora, matches
from dew.converters.lora.peft_config import read_config
from dew.converters.lora.peft_layout import (
    is_transposed,
    join_factors,
    split_factors,
    stored_shapes,
)
from dew.converters.mapping.table import Table
from dew.converters.pretrained import Pretrained
from dew.converters.save import gathering, on_host
from dew.nn.lora import adapter_leaves
from dew.tree import flatten, unflatten
from dew.typing import Path, Variables

PREFIX = "base_model.model."
"""Prefix of the names of torch's modules in PEFT's files."""

READ_AS_EXPERTS = ("deepseek_v2", "deepseek_v3", "qwen3_moe")
"""Models in which PEFT (0.21) treats every target in `EXPERTS` as stacked experts."""

EXPERTS = ("gate_proj", "up_proj", "down_proj")

TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
"""PEFT's task by the end of an architecture's name; others are left open."""


def base_address(adapter: Folder) -> str:
    """Returns the address of the model that an adapter was trained over.

    Raises:
        ValueError: the adapter's config names no base.
    """
    config = adapter.adapter_config
    name, revision = (config.get(k) for k in ("base_model_name_or_path", "revision"))
    if not name:
        raise ValueError(
            f"{adapter.path / ADAPTER_CONFIG} has no base_model_name_or_path; load the "
            "base and give it: dew.load(FOLDER, base=…)"
        )
    return f"{name}@{revision}" if revision else name


def load_adapter(
    adapter: Folder, base: Pretrained, *, dtype: DTypeLike | None = None
) -> Adapted:
    """Returns a loaded base model with the adapter of a folder.

    Args:
        adapter: the folder of adapter_config.json and adapter_model.safetensors.
        base: the model that the adapter was trained over.
        dtype: dtype of all parameters; None keeps the stored ones.

    Raises:
        ValueError: a field of the config, a target or a tensor is not accounted for;
            the message lists all of them.
    """
    config = adapter.adapter_config
    lora = read_config(config, adapter.address)
    trained = find_trained(base, lora)
    form = Form(base=base, trained=trained)
    tied = bool(config.get("ensure_weight_tying"))
    _check(form, adapter, tied=tied)
    leaves = flatten(base.variables) | form.leaves(adapter.weights)
    if dtype is not None:
        # Buffers keep their dtype: they are positions and tables, not parameters.
        leaves |= {
            path: leaf.astype(dtype)
            for path, leaf in leaves.items()
            if path[0] == "params" and leaf.dtype != dtype
        }
    return attach(base, lora, trained, unflatten(leaves), folder=adapter)


def save_adapter(
    source: Adapted,
    folder: str | os.PathLike[str],
    variables: Variables,
    *,
    overwrite: bool = False,
    check: Callable[[FilePath], object] | None = None,
) -> FilePath:
    """Writes the adapter alone, as a folder that `peft.PeftModel` loads over the base.

    Under several processes all of them call it, and the first writes.

    Args:
        source: the adapted model; its base's address goes into the config.
        folder: the folder to write; it appears when it is complete.
        variables: trained variables of the adapted model.
        overwrite: whether an existing folder is replaced.
        check: called with the finished folder before it gets its name; may raise.

    Raises:
        ValueError: torch would read the base's folder differently, because it was
            loaded with `tied`, or PEFT would apply a module's adapter to another.
    """
    ties = source.base.ties
    # The adapter's config names its base by address alone, so whoever loads it gets the
    # base as that folder's own config describes it, without tied=….
    if ties.edits or ties.dropped or ties.borrowed:
        raise ValueError(
            f"{source.base.address} was read with tied=…, so no folder holds the "
            "adapter's base; save the base, load that, and adapt it, or merge"
        )
    # PEFT's own loader would move these adapters onto its fused experts, silently.
    misread = [name for name in source.parts if matches(EXPERTS, name)]
    if misread and source.config.get("model_type") in READ_AS_EXPERTS:
        raise ValueError(
            f"PEFT would read {', '.join(brief(misread))} as its experts; leave them "
            "out (exclude=…), or write the whole model (merge=True, --merge)"
        )
    form = Form(base=source.base, trained=source.trained)
    # Padding rows and the like are added for a run; no folder has them.
    _, variables = source.base.plain(variables)
    target = FilePath(folder).expanduser().absolute()
    with gathering():
        # Every process takes part: sharded leaves are gathered here.
        tensors = form.tensors(variables)
        if jax.process_index() == 0:
            with write_atomically(target, overwrite=overwrite) as partial:
                write_arrays(partial / ADAPTER_WEIGHTS, tensors, {"format": "pt"})
                fields = form.config(source.lora, tensors)
                config = {**_constant_config(source), **fields}
                text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
                (partial / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
                if check is not None:
                    check(partial)
    return target


def _constant_config(source: Adapted) -> dict[str, Any]:
    """Returns the config's fields that do not depend on the adapted modules."""
    folder = source.base.folder
    address, _, revision = folder.address.removeprefix("hf://").partition("@")
    # A folder of that name here would be loaded before the hub's repository.
    is_hub = bool(HUB_ID.fullmatch(address)) and not FilePath(address).exists()
    architectures = source.config.get("architectures") or [""]
    tasks = [task for end, task in TASKS.items() if architectures[0].endswith(end)]
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
    """Layout of one adapter in a PEFT folder: names, shapes, and the conversion."""

    base: Pretrained
    trained: Trained

    @cached_property
    def table(self) -> Table:
        """The base's tensors under the names of torch's modules."""
        return torch_table(self.base)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every stored tensor; each matrix has one A."""
        shapes = {}
        for module, parts in self.trained.parts.items():
            factors = stored_shapes(parts[0], parts[0].adapter.rank)
            shapes |= dict(zip(_names(module), factors, strict=True))
        saved = {PREFIX + name: self.table.shapes[name] for name in self.trained.saved}
        return shapes | saved

    def leaves(self, weights: Weights) -> dict[Path, Array]:
        """Returns the adapter's variables, read from its folder's tensors."""
        leaves: dict[Path, Array] = {}
        for module, parts in self.trained.parts.items():
            a, b = (weights.view(name) for name in _names(module))
            for part in parts:
                factors = (jnp.asarray(x) for x in split_factors(part, a, b))
                leaves |= adapter_leaves(part.adapter, *factors)
        for name in self.trained.saved:
            for piece in self.table.sources[name]:
                stored = weights.view(PREFIX + name)
                leaves[piece.target] = jnp.asarray(piece.read(stored))
        return leaves

    def tensors(self, variables: Variables) -> dict[str, np.ndarray]:
        """Returns the tensors to store, gathered onto the host."""
        leaves = flatten(variables)
        tensors = {}
        for module, parts in self.trained.parts.items():
            factors = join_factors(parts, leaves)
            tensors |= dict(zip(_names(module), factors, strict=True))
        for name in self.trained.saved:
            tensors[PREFIX + name] = self.table.write(
                name, lambda piece: on_host(leaves[piece.target])
            )
        return tensors

    def config(
        self, lora: Lora, tensors: Mapping[str, np.ndarray]
    ) -> dict[str, object]:
        """Returns the config's fields for the modules, their ranks and scales."""
        ranks = {m: len(tensors[_names(m)[0]]) for m in self.trained.parts}
        alphas = {}
        for module, rank in ranks.items():
            # Factors stored side by side have a larger rank than each map's own; the
            # scale is alpha / rank, so alpha grows along and the function is the same.
            wider = rank // lora.rank_of(module)
            alphas[module] = _plain(
                lora.alpha_of(module) * (wider**0.5 if lora.rslora else wider)
            )
        modules = {module_of(name) for name in self.table.sources}
        whole = {module_of(name) for name in self.trained.saved}
        parts = [part for parts in self.trained.parts.values() for part in parts]
        tied = bool(self.table.copies & {*self.trained.saved})
        return {
            "r": lora.rank,
            "lora_alpha": _plain(lora.alpha),
            "rank_pattern": _patterns(ranks, lora.rank),
            "alpha_pattern": _patterns(alphas, lora.alpha),
            "target_modules": shortest_ends(set(self.trained.parts), modules),
            "modules_to_save": shortest_ends(whole, modules) or None,
            "fan_in_fan_out": all(is_transposed(part) for part in parts),
            **({"ensure_weight_tying": True} if tied else {}),
        }


def _names(module: str) -> tuple[str, str]:
    """Returns the stored names of a torch module's factors A and B."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def shortest_ends(chosen: set[str], every: set[str]) -> list[str]:
    """Returns the shortest name ends that match `chosen` and no other of `every`."""
    selected = set()
    for name in chosen:
        parts = name.split(".")
        for i in range(len(parts) - 1, -1, -1):
            end = ".".join(parts[i:])
            if {n for n in every if n == end or n.endswith(f".{end}")} <= chosen:
                selected.add(end)
                break
    return sorted(selected)


def _plain(number: float) -> float | int:
    """Returns whole numbers as integers, as PEFT writes them."""
    return int(number) if number == int(number) else number


def _patterns(values: Mapping[str, object], default: object) -> dict[str, object]:
    """Returns values other than the default, by ends of their modules' names."""
    others = {value for value in values.values() if value != default}
    return {
        end: value
        for value in others
        for end in shortest_ends(
            {n for n, v in values.items() if v == value}, {*values}
        )
    }


def _check(form: Form, adapter: Folder, *, tied: bool) -> None:
    """Raises everything that is wrong with an adapter's tensors, at once."""
    weights = adapter.weights
    expected, stored = form.shapes(), weights.shapes()
    lost = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected]
    faults = [
        *weights.faults,
        *(f"missing: {line}" for line in brief(lost)),
        *(f"unexpected: {line}" for line in brief(extra, near=lost or [*expected])),
        *(
            f"mis-shaped: {name} is {list(stored[name])}, and should be {list(shape)}"
            for name, shape in expected.items()
            if name in stored and stored[name] != shape
        ),
        *unreadable(weights, [name for name in expected if name in stored]),
    ]
    copies = form.table.copies & {*form.trained.saved}
    if copies and not tied:
        faults.append(
            f"it trains the table that {', '.join(copies)} repeats without "
            "ensure_weight_tying, so torch has two tables where the base has one; "
            "merge it in PEFT and load that"
        )
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise ValueError(f"the adapter {adapter.address} does not fit its base:{lines}")
