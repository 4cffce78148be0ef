"""New tokens for a model, and rows that are no tokens.

New tokens are written as a folder of their own: an adapter over them, and every tool,
needs one. Padding is of the run alone: it is in no folder.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer

from dew.converters.config.fields import MultiUse, Use
from dew.converters.folder.atomic import write_atomically
from dew.converters.folder.folder import CONFIG
from dew.converters.folder.safetensors import Spec, write_file
from dew.converters.folder.weights import INDEX
from dew.converters.load import family_of
from dew.converters.lora.adapters import Adapted
from dew.converters.mapping.table import rule_path
from dew.converters.pretrained import Pretrained
from dew.nn.decoder import Decoder
from dew.tree import flatten, unflatten
from dew.typing import Path, Variables

TOKENIZER = "tokenizer.json"
TOKEN_ROWS = (
    *("embed/weight", "head/weight", "head/bias"),
    *("head/vocab_own/weight", "head/vocab_own/bias", "head/vocab_tied/bias"),
)
"""The variables that have a row for each token."""


def has_token_rows(path: Path) -> bool:
    """Accepts the variables that have a row for each token."""
    return rule_path(path) in TOKEN_ROWS


def extend_vocabulary(
    source: Pretrained,
    tokens: Sequence[str],
    folder: str | os.PathLike[str],
    *,
    special: bool = False,
) -> FilePath:
    """Writes a native model's folder with more tokens.

    A new row, of the input and the output table and of the head's bias, is the mean of
    the rows of all tokens that were there, in float64. New tokens get the ids after the
    last that the tokenizer knows; where the tables have rows to spare there, those are
    taken, and otherwise the tables and the config's `vocab_size` grow. All other
    tensors and side files keep their bytes. `special` tokens are left out when text is
    decoded without specials.

    Raises:
        ValueError: a token is empty, given twice or known already, the model has no
            tokenizer or fewer rows than its tokenizer has tokens, or the folder is
            taken; all faults are named.
    """
    extension = _Extension(source, tuple(tokens), special)
    extension.check()
    target = FilePath(folder).expanduser().absolute()
    with write_atomically(target) as partial:
        extension.write(partial)
    return target


@dataclass(frozen=True)
class _Extension:
    """One model's new tokens."""

    source: Pretrained
    tokens: tuple[str, ...]
    special: bool

    def check(self) -> None:
        """Raises all that is wrong at once."""
        source = self.source
        if source.road != "native" or isinstance(source, Adapted | Padded):
            raise ValueError(
                f"{source.address}: a vocabulary is extended in a plain folder, on the "
                "native road; save the model as one, and load that"
            )
        if source.tokenizer is None:
            raise ValueError(f"{source.address} has no {TOKENIZER} to add tokens to")
        faults = [] if self.tokens else ["no tokens were given"]
        faults += [f"{t!r} is empty" for t in self.tokens if not t.strip()]
        faults += [
            f"{token!r} is given {self.tokens.count(token)} times"
            for token in dict.fromkeys(self.tokens)
            if self.tokens.count(token) > 1
        ]
        faults += [
            f"{token!r} has the id {self._known[token]} already"
            for token in self.tokens
            if token in self._known
        ]
        if max(self._known.values()) >= self._rows:
            faults.append(
                f"the tokenizer uses id {max(self._known.values())}, and the model has "
                f"{self._rows} rows"
            )
        ties = source.ties
        if ties.edits or ties.dropped or ties.borrowed:
            faults.append("it was read with tied=…: save it and load that")
        if faults:
            raise ValueError(
                f"the vocabulary of {source.address} cannot be extended: "
                + "; ".join(faults)
            )

    @cached_property
    def _known(self) -> Mapping[str, int]:
        assert self.source.tokenizer is not None
        return self.source.tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def _rows(self) -> int:
        return int(self.source.table.variables["params", "embed", "weight"][0])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer with the new tokens."""
        assert self.source.tokenizer is not None
        grown = Tokenizer.from_str(self.source.tokenizer.to_str())
        grown.add_tokens(
            [
                AddedToken(token, normalized=False, special=self.special)
                for token in self.tokens
            ]
        )
        return grown

    @cached_property
    def _new(self) -> dict[str, int]:
        """The ids of the new tokens."""
        known = self.tokenizer.get_vocab(with_added_tokens=True)
        return {token: known[token] for token in self.tokens}

    @property
    def rows(self) -> int:
        """Rows of the tables afterwards."""
        return max(self._rows, max(self._new.values()) + 1)

    @cached_property
    def _grown(self) -> frozenset[str]:
        """The stored tensors that have a row for each token."""
        sources = self.source.table.sources.items()
        return frozenset(n for n, pieces in sources if has_token_rows(pieces[0].target))

    def write(self, folder: FilePath) -> None:
        """Writes weights, side files and, last, the config."""
        weights = self.source.folder.weights
        total = 0
        for file, names in weights.files.items():
            specs = [self._spec(name) for name in names]
            total += sum(spec.size_bytes for spec in specs)
            metadata = {**weights.metadata.get(file, {}), "format": "pt"}
            write_file(folder / file, specs, self._values, metadata, weights.release)
        if weights.index is not None:
            index = json.loads(weights.index)
            index["metadata"] = {**index.get("metadata", {}), "total_size": total}
            _write(folder / INDEX, index)
        self._write_side_files(folder)
        _write(folder / CONFIG, {**self.source.config, **self._config()})

    def _spec(self, name: str) -> Spec:
        weights = self.source.folder.weights
        shape = tuple(weights.entries[name].shape)
        if name in self._grown:
            shape = (self.rows, *shape[1:])
        return Spec(name=name, dtype=weights.dtype(name), shape=shape)

    def _values(self, name: str) -> np.ndarray:
        stored = self.source.folder.weights.view(name)
        if name not in self._grown:
            return stored
        known = np.fromiter(self._known.values(), np.int64)
        mean = stored[np.unique(known)].mean(axis=0, dtype=np.float64)
        grown = np.zeros((self.rows, *stored.shape[1:]), stored.dtype)
        grown[: len(stored)] = stored
        # Rows that are added and have no token, as between spare ones, are means too.
        grown[len(stored) :] = mean.astype(stored.dtype)
        grown[list(self._new.values())] = mean.astype(stored.dtype)
        return grown

    def _config(self) -> dict[str, Any]:
        """The field that counts tokens, by the name that the file has it under."""
        family = family_of(self.source.config, self.source.address)
        (name,) = (
            name
            for name, known in family.fields.items()
            for use in (known.uses if isinstance(known, MultiUse) else (known,))
            if isinstance(use, Use) and use.to == "vocab"
        )
        return {name: self.rows}

    def _write_side_files(self, folder: FilePath) -> None:
        source = self.source.folder
        for name in source.side_files:
            if name not in (CONFIG, TOKENIZER):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.path / name, folder / name)
        (folder / TOKENIZER).write_text(
            self.tokenizer.to_str(pretty=True), encoding="utf-8"
        )
        described = {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": self.special,
            }
            for token, i in self._new.items()
        }
        _amend(folder / "tokenizer_config.json", "added_tokens_decoder", described)
        _amend(folder / "added_tokens.json", None, self._new)


def _amend(file: FilePath, key: str | None, more: Mapping[str, Any]) -> None:
    """Adds entries to a file that lists added tokens, if it is there and does."""
    if not file.exists():
        return
    whole = json.loads(file.read_text(encoding="utf-8"))
    if key is None:
        _write(file, {**whole, **more})
    elif key in whole:
        _write(file, {**whole, key: {**whole[key], **more}})


def _write(file: FilePath, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Padded(Pretrained):
    """A model whose tables of tokens have rows at their end that are no tokens.

    They make no logits, so losses are those without them; folders do not hold them.
    """

    base: Pretrained = field(repr=False)

    def plain(self, variables: Variables) -> tuple[Pretrained, Variables]:
        """The model without the rows."""
        wanted = self.base.table.variables
        leaves = flatten(variables)
        for path, leaf in leaves.items():
            if has_token_rows(path):
                leaves[path] = leaf[: wanted[path][0]]
        return self.base.plain(unflatten(leaves))


def pad_vocabulary(source: Pretrained, multiple: int) -> Pretrained:
    """Gives a native decoder rows up to a multiple, so that devices split them evenly.

    The rows are zeros and stay so: they make no logits and get no gradient. Exports
    leave them out, and `vocab_size` is as it was.

    Raises:
        ValueError: the multiple is less than 1, or the model is no native decoder or
            has been padded or adapted already: pad first, then adapt.
    """
    model = source.model
    if multiple < 1:
        raise ValueError(f"a multiple must be >= 1, got {multiple}")
    if not isinstance(model, Decoder) or isinstance(source, Adapted | Padded):
        raise ValueError(
            f"{source.address} is a {type(source).__name__} of a "
            f"{type(model).__name__}: a native decoder is padded, before it is adapted"
        )
    padding = -model.config.vocab % multiple
    if not padding:
        return source
    leaves = flatten(source.variables)
    for path, leaf in leaves.items():
        if has_token_rows(path):
            leaves[path] = jnp.pad(leaf, [(0, padding), *[(0, 0)] * (leaf.ndim - 1)])
    kept = {f.name: getattr(source, f.name) for f in fields(Pretrained)}
    config = replace(model.config, extra_rows=padding)
    return Padded(
        **{
            **kept,
            "model": model.clone(config=config),
            "variables": unflatten(leaves),
        },
        base=source,
    )
