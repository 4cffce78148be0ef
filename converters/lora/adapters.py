"""LoRA adapters over a pretrained model, and the choice of matrices that get one.

Targets are names of torch's modules, as in PEFT, or paths of dew's variables. Where
torch fuses several linear maps into one matrix (GPT-2's `c_attn`, Phi 3's `qkv_proj`)
each map has an adapter of its own; `dew.converters.lora.peft_layout` joins them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from dew.converters.errors import brief, nearest
from dew.converters.folder.folder import Folder
from dew.converters.load import family_of
from dew.converters.lora.config import ALL_LINEAR, Lora, matches
from dew.converters.mapping.build import build_table
from dew.converters.mapping.table import Piece, Table, rule_path
from dew.converters.pretrained import Pretrained
from dew.nn.block import Scanned
from dew.nn.lora import Adapter, Site, is_factor, merge_adapters, sites, with_adapters
from dew.typing import Path, Variables


@dataclass(frozen=True, kw_only=True)
class Part:
    """The adapter of one linear map, and the map's place in a matrix of torch's.

    `piece` is that place: the rows or columns that hold the map's weight.
    """

    adapter: Adapter
    piece: Piece


@dataclass(frozen=True, kw_only=True)
class Adapted(Pretrained):
    """A pretrained model with an adapter; `variables` hold both, `base` is without.

    The base's arrays are shared, not copied. `parts` are the adapted linear maps by
    torch's module, and `saved` the stored tensors of which all numbers are trained.
    """

    base: Pretrained
    lora: Lora
    parts: Mapping[str, tuple[Part, ...]]
    saved: tuple[str, ...] = ()

    @cached_property
    def torch_table(self) -> Table:
        """The base's tensors under the names of torch's modules."""
        return torch_table(self.base)

    @cached_property
    def _saved_paths(self) -> frozenset[Path]:
        """The variables of the tensors in `saved`."""
        sources = self.torch_table.sources
        return frozenset(p.target for name in self.saved for p in sources[name])

    def is_trained(self, path: Path) -> bool:
        """Accepts the variables that are trained, for an objective's `trainable`."""
        return is_factor(path) or path in self._saved_paths

    @property
    def content_hash(self) -> str:
        """Hash of the base, joined by the adapter's if it was loaded from a folder."""
        hashes = [self.base.content_hash]
        if self.folder.weights is not self.base.folder.weights:
            hashes.append(self.folder.weights.content_hash)
        return "+".join(hashes)

    @property
    def trained(self) -> "Trained":
        """The linear maps and whole tensors that the adapter trains."""
        return Trained(parts=self.parts, saved=self.saved)

    def plain(self, variables: Variables) -> tuple[Pretrained, Variables]:
        """Returns the base and its variables with the adapter merged into them."""
        return self.base.plain(merge_adapters(variables))


def adapt(source: Pretrained, lora: Lora, *, key: Key[Array, ""]) -> Adapted:
    """Returns a native model with a new adapter; B is zero, so logits are unchanged.

        >>> import dew, jax, numpy as np
        >>> source = dew.load(FOLDER)
        >>> adapted = dew.adapt(source, dew.Lora(rank=4), key=jax.random.key(0))
        >>> len(adapted.parts), adapted.is_trained(("params", "embed", "weight"))
        (14, False)
        >>> ids = np.array([[1, 2, 3]])
        >>> bool((adapted.logits(ids) == source.logits(ids)).all())
        True

    `is_trained` is the `trainable` of an objective that trains the adapter alone.

    Args:
        source: a model of the native road without an adapter.
        lora: the adapter's targets, rank and scale.
        key: random key of the factors A.

    Raises:
        ValueError: a target is not a linear map or not a module of the model, or the
            model was loaded by another road; the message lists all faults.
    """
    trained = find_trained(source, lora)
    adapters = [part.adapter for parts in trained.parts.values() for part in parts]
    variables = with_adapters(source.variables, adapters, key)
    return attach(source, lora, trained, variables, folder=source.folder)


def attach(
    source: Pretrained,
    lora: Lora,
    trained: "Trained",
    variables: Variables,
    *,
    folder: Folder,
) -> Adapted:
    """Returns the model with an adapter whose variables are in `variables`.

    `folder` is the one the adapter was read from; for a new adapter it is the base's.
    """
    base = {f.name: getattr(source, f.name) for f in fields(Pretrained)}
    return Adapted(
        **{**base, "variables": variables, "folder": folder},
        base=source,
        lora=lora,
        parts=trained.parts,
        saved=trained.saved,
    )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Linear maps, by torch's module, and whole tensors that an adapter trains."""

    parts: Mapping[str, tuple[Part, ...]]
    saved: tuple[str, ...]


def find_trained(source: Pretrained, lora: Lora) -> Trained:
    """Returns the linear maps and tensors that a `Lora` selects in a model.

    Raises:
        ValueError: as from `adapt`.
    """
    if source.road != "native":
        raise ValueError(
            f"{source.address} was loaded by the {source.road} road; adapters need "
            'native linear maps: load with road="native"'
        )
    if isinstance(source, Adapted):
        raise ValueError(
            f"{source.address} has an adapter already; merge it (dew.save(…, "
            "merge=True)) and adapt that"
        )
    choice = _Choice(source, lora)
    parts, saved = choice.parts(), choice.saved()
    if choice.faults:
        raise ValueError(
            f"the adapter does not fit {source.address}: " + "; ".join(choice.faults)
        )
    return Trained(parts=parts, saved=saved)


def torch_table(source: Pretrained) -> Table:
    """Returns the tensors of a native model under the names of torch's modules.

    Names in the weight files may differ from these.
    """
    family = family_of(source.config, source.address)
    config = {**source.config, **source.ties.edits}
    copies = [
        copy.rule
        for copy in family.copies
        if family.has(copy, config)
        and (copy.flag is None or family.flag(config, copy.flag))
    ]
    return build_table(family.rules, source.table.variables, copies=copies)


def module_of(stored: str) -> str:
    """Returns the torch module that a stored tensor is a parameter of."""
    return stored.rpartition(".")[0]


@dataclass
class _Choice:
    """Selection of a `Lora` in one model; `faults` collects what does not fit."""

    source: Pretrained
    lora: Lora
    faults: list[str] = field(default_factory=list)

    @cached_property
    def _table(self) -> Table:
        return torch_table(self.source)

    @cached_property
    def _modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module_of(name) for name in self._table.sources))

    @cached_property
    def _sites(self) -> dict[str, list[tuple[Site, Piece]]]:
        """Linear maps, by the torch module whose matrix holds them."""
        model: Any = self.source.model
        inputs = {"tokens": jnp.zeros((1, 1), jnp.int32)}
        linear: dict[Path, Site] = {
            (*site.path, "weight"): site for site in sites(model, inputs)
        }
        return {
            module_of(name): [(linear[piece.target], piece) for piece in pieces]
            for name, pieces in self._table.sources.items()
            if name.endswith(".weight") and all(p.target in linear for p in pieces)
        }

    def parts(self) -> dict[str, tuple[Part, ...]]:
        """Returns the adapted linear maps by torch's module."""
        pairs_of = {name: self._target_sites(name) for name in self._target_modules()}
        parts = {
            name: tuple(self._make_part(name, *pair) for pair in pairs)
            for name, pairs in pairs_of.items()
            if pairs
        }
        if not parts and not self.faults:
            self.faults.append(
                f"targets = {self.lora.targets!r} selects no linear map; there are "
                f"{', '.join(brief(self._sites))}"
            )
        self._check_scan([part.adapter for each in parts.values() for part in each])
        return parts

    def _target_modules(self) -> list[str]:
        """Returns the torch modules that the targets select."""
        targets = self.lora.targets
        if callable(targets) or targets == ALL_LINEAR:
            modules = [*self._sites]
        else:
            modules = [name for name in self._modules if matches(targets, name)]
            if type(targets) is not str:
                self._check_names("targets", targets, modules)
        modules = [name for name in modules if not self._is_excluded(name)]
        odd = [name for name in modules if name not in self._sites]
        self.faults += [
            f"{line} is no linear map of ours; train it whole, by to_save"
            for line in brief(odd)
        ]
        return [name for name in modules if name in self._sites]

    def _is_excluded(self, module: str) -> bool:
        whole = (rf"(^|.*\.){name}($|\..*)" for name in self.lora.to_save)
        return matches(self.lora.exclude, module) or any(
            re.match(pattern, module) for pattern in whole
        )

    def _target_sites(self, module: str) -> list[tuple[Site, Piece]]:
        pairs, targets = self._sites[module], self.lora.targets
        if callable(targets):
            return [pair for pair in pairs if targets(pair[1].target)]
        return pairs

    def _make_part(self, module: str, site: Site, piece: Piece) -> Part:
        adapter = Adapter(
            site=site,
            rank=self.lora.rank_of(module),
            scale=self.lora.scale(module),
            dropout=self.lora.dropout,
        )
        return Part(adapter=adapter, piece=piece)

    def _check_names(
        self, argument: str, names: Sequence[str], modules: Sequence[str]
    ) -> None:
        ends = sorted({name.rpartition(".")[2] for name in self._modules})
        self.faults += [
            f"{argument} names {name!r}, which is no module{nearest(name, ends)}"
            for name in names
            if not any(matches((name,), module) for module in modules)
        ]

    def _check_scan(self, adapters: Sequence[Adapter]) -> None:
        """Adds a fault for a scan over layers whose adapters differ."""
        model = self.source.model
        banks = model.banks() if isinstance(model, Scanned) else ()
        for bank in banks:
            at = 1 + len(bank.namespace)
            layers: dict[str, set[Any]] = {name: set() for name in bank.view.names}
            for adapter in adapters:
                path = adapter.site.path
                if path[1:at] == bank.namespace:
                    layers[path[at]].add((path[at + 1 :], adapter.rank))
            if len({frozenset(layer) for layer in layers.values()}) > 1:
                self.faults.append(
                    "a scanned stack needs the same adapters in every layer; unroll it "
                    "(--stack unrolled, or model.clone(scan=False))"
                )

    def saved(self) -> tuple[str, ...]:
        """Returns the stored tensors of which all numbers are trained."""
        ends = tuple(self.lora.to_save)
        tensors = [
            name
            for name in self._table.sources
            if any(path.endswith(ends) for path in _ancestors(module_of(name)))
        ]
        self._check_saved(ends, tensors)
        return tuple(tensors)

    def _check_saved(self, names: Sequence[str], tensors: list[str]) -> None:
        lost = [
            name
            for name in names
            if not any(
                path.endswith(name)
                for t in tensors
                for path in _ancestors(module_of(t))
            )
        ]
        ends = sorted({name.rpartition(".")[2] for name in self._modules})
        self.faults += [
            f"to_save names {name!r}, which is no module{nearest(name, ends)}"
            for name in lost
        ]
        stacked = [
            t
            for t in tensors
            if any(p.entry is not None for p in self._table.sources[t])
        ]
        self.faults += [
            f"{line} is one of a stack of experts, which torch's modules keep otherwise"
            for line in brief(stacked)
        ]
        for copy in self._table.copies:
            origin = rule_path(self._table.sources[copy][0].target)
            originals = [t for t in tensors if t not in self._table.copies]
            owners = {
                rule_path(p.target) for t in originals for p in self._table.sources[t]
            }
            if origin in owners and copy not in tensors:
                tensors.append(copy)
            elif copy in tensors and origin not in owners:
                self.faults.append(
                    f"{copy} is tied to {origin}: save that module, and both move"
                )


def _ancestors(module: str) -> list[str]:
    """Returns a module's name and those of the modules that contain it."""
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
