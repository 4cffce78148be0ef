"""A LoRA adapter over a pretrained model: which matrices get one, and what it is.

Targets go by the names that torch's modules have, as in PEFT, or by our own paths. Of
a matrix that torch fuses and we keep apart (GPT-2's `c_attn`, Phi 3's `qkv_proj`) each
part has an adapter of its own; `dew.converters.lora.peft` says how the two become one.
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
    """One of our linear maps in a matrix of torch's: its adapter, and how it lies.

    `piece` places the map's weight in the matrix.
    """

    adapter: Adapter
    piece: Piece


@dataclass(frozen=True, kw_only=True)
class Adapted(Pretrained):
    """A pretrained model with an adapter; `variables` hold both, `base` has none.

    The base's arrays are shared, not copied. `parts` are the adapted linear maps by
    torch's module, and `saved` the stored tensors that are trained whole.
    """

    base: Pretrained
    lora: Lora
    parts: Mapping[str, tuple[Part, ...]]
    saved: tuple[str, ...] = ()

    @cached_property
    def torch_table(self) -> Table:
        """The table of the base under the names that torch's modules have."""
        return torch_table(self.base)

    @cached_property
    def _whole(self) -> frozenset[Path]:
        """The variables that are trained whole."""
        sources = self.torch_table.sources
        return frozenset(p.target for name in self.saved for p in sources[name])

    def is_trained(self, path: Path) -> bool:
        """Accepts what an adapter trains, for an objective's `trainable`."""
        return is_factor(path) or path in self._whole

    @property
    def content_hash(self) -> str:
        """That of the base, and that of the adapter if it was loaded from a folder."""
        hashes = [self.base.content_hash]
        if self.folder.weights is not self.base.folder.weights:
            hashes.append(self.folder.weights.content_hash)
        return "+".join(hashes)

    @property
    def trained(self) -> "Trained":
        """What the adapter trains: linear maps, and whole tensors."""
        return Trained(parts=self.parts, saved=self.saved)

    def plain(self, variables: Variables) -> tuple[Pretrained, Variables]:
        """The base, with the adapter merged into its weights."""
        return self.base.plain(merge_adapters(variables))


def adapt(source: Pretrained, lora: Lora, *, key: Key[Array, ""]) -> Adapted:
    """Adds a new LoRA adapter to a native model; its initial update is zero.

    The result trains its adapter alone under `trainable=source.is_trained`:

    >>> import jax
    >>> import dew
    >>> lora = dew.Lora(rank=4, targets=("q_proj", "v_proj"))
    >>> source = dew.adapt(dew.load(FOLDER), lora, key=jax.random.key(0))
    >>> from dew.objectives import CausalLM
    >>> objective = CausalLM(source=source, seq_len=32, trainable=source.is_trained)
    >>> factors = objective.init(jax.random.key(1))["params"]["layers"]["0"]["attn"]
    >>> {name: leaf.shape for name, leaf in factors["q"].items()}
    {'lora_a': (4, 32), 'lora_b': (4, 8, 4)}

    Raises:
        ValueError: a target is not a linear map or not a module of the model, or the
            model was loaded by the lowered road; all faults are named.
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
    """Returns the model with an adapter whose variables exist already.

    `folder` is the one the adapter was read from; a new adapter has its base's.
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
    """What an adapter trains: linear maps by torch's module, and whole tensors."""

    parts: Mapping[str, tuple[Part, ...]]
    saved: tuple[str, ...]


def find_trained(source: Pretrained, lora: Lora) -> Trained:
    """Returns the linear maps and tensors that a Lora's settings select in a model.

    Raises:
        ValueError: see `adapt`.
    """
    if source.road != "native":
        raise ValueError(
            f"{source.address} came by the {source.road} road; adapters go beside "
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
    """The table of a native model under the names that torch's modules have.

    The file may spell them in another way.
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
    """The torch module that a stored tensor is a parameter of."""
    return stored.rpartition(".")[0]


@dataclass
class _Choice:
    """Targets held against one model; `faults` gather what does not fit."""

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
        """The linear maps of each torch module that is a matrix of them."""
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
        """The adapted linear maps, by torch's module."""
        wanted = {name: self._wanted(name) for name in self._targeted()}
        found = {
            name: tuple(self._part(name, *pair) for pair in pairs)
            for name, pairs in wanted.items()
            if pairs
        }
        if not found and not self.faults:
            self.faults.append(
                f"targets = {self.lora.targets!r} selects no linear map; there are "
                f"{', '.join(brief(self._sites))}"
            )
        self._check_scan([part.adapter for parts in found.values() for part in parts])
        return found

    def _targeted(self) -> list[str]:
        """The torch modules that the targets name."""
        targets = self.lora.targets
        if callable(targets) or targets == ALL_LINEAR:
            named = [*self._sites]
        else:
            named = [name for name in self._modules if matches(targets, name)]
            if type(targets) is not str:
                self._check_names("targets", targets, named)
        kept = [name for name in named if not self._is_excluded(name)]
        odd = [name for name in kept if name not in self._sites]
        self.faults += [
            f"{line} is no linear map of ours; train it whole, by to_save"
            for line in brief(odd)
        ]
        return [name for name in kept if name in self._sites]

    def _is_excluded(self, module: str) -> bool:
        whole = (rf"(^|.*\.){name}($|\..*)" for name in self.lora.to_save)
        return matches(self.lora.exclude, module) or any(
            re.match(pattern, module) for pattern in whole
        )

    def _wanted(self, module: str) -> list[tuple[Site, Piece]]:
        pairs, targets = self._sites[module], self.lora.targets
        if callable(targets):
            return [pair for pair in pairs if targets(pair[1].target)]
        return pairs

    def _part(self, module: str, site: Site, piece: Piece) -> Part:
        adapter = Adapter(
            site=site,
            rank=self.lora.rank_of(module),
            scale=self.lora.scale(module),
            dropout=self.lora.dropout,
        )
        return Part(adapter=adapter, piece=piece)

    def _check_names(
        self, what: str, wanted: Sequence[str], found: Sequence[str]
    ) -> None:
        ends = sorted({name.rpartition(".")[2] for name in self._modules})
        self.faults += [
            f"{what} names {name!r}, which is no module{nearest(name, ends)}"
            for name in wanted
            if not any(matches((name,), module) for module in found)
        ]

    def _check_scan(self, adapters: Sequence[Adapter]) -> None:
        """Refuses a scan over layers whose adapters differ."""
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
        """The stored tensors that are trained whole."""
        wanted = self.lora.to_save
        found = [
            name
            for name in self._table.sources
            if any(above.endswith(tuple(wanted)) for above in _above(module_of(name)))
        ]
        self._check_saved(wanted, found)
        return tuple(found)

    def _check_saved(self, wanted: Sequence[str], found: list[str]) -> None:
        lost = [
            name
            for name in wanted
            if not any(a.endswith(name) for n in found for a in _above(module_of(n)))
        ]
        ends = sorted({name.rpartition(".")[2] for name in self._modules})
        self.faults += [
            f"to_save names {name!r}, which is no module{nearest(name, ends)}"
            for name in lost
        ]
        stacked = [
            n for n in found if any(p.entry is not None for p in self._table.sources[n])
        ]
        self.faults += [
            f"{line} is one of a stack of experts, which torch's modules keep otherwise"
            for line in brief(stacked)
        ]
        for copy in self._table.copies:
            origin = rule_path(self._table.sources[copy][0].target)
            held = [n for n in found if n not in self._table.copies]
            owners = {rule_path(p.target) for n in held for p in self._table.sources[n]}
            if origin in owners and copy not in found:
                found.append(copy)
            elif copy in found and origin not in owners:
                self.faults.append(
                    f"{copy} is tied to {origin}: save that module, and both move"
                )


def _above(module: str) -> list[str]:
    """A module and those that it stands in."""
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
