"""New tokens in a model's vocabulary, and padding rows of its token tables.

A model with new tokens is written as a folder of its own, which adapters over it and
other tools need. Padding rows exist in a run only and are never written.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer

from dew.converters.config.fields import MultiUse, Use
from dew.converters.folder.atomic import write_atomically
from dew.converters.folder.json_files import read_json
from dew.converters.folder.safetensors import Spec
from dew.converters.folder.write import copied_files, json_bytes, write_folder
from dew.converters.load import Shardings, family_of, sharding_function
from dew.converters.lora.adapters import Adapted
from dew.converters.mapping.table import rule_path
from dew.converters.pretrained import Pretrained
from dew.nn.decoder import Decoder
from dew.tree import flatten, unflatten
from dew.typing import Path, Variables

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED_TOKENS = "added_tokens.json"
ADDED = "added_tokens_decoder"
"""Field of tokenizer_config.json that lists added tokens by id."""
TOKEN_ROWS = (
    *("embed/weight", "head/weight", "head/bias"),
    *("head/vocab_own/weight", "head/vocab_own/bias", "head/vocab_tied/bias"),
)
"""Variables that have one row for each token."""


def has_token_rows(path: Path) -> bool:
    """Accepts the variables that have one row for each token."""
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
    the rows of all earlier tokens, computed in float64. New tokens get the ids after
    the tokenizer's last; spare rows of the tables at those ids are used first, and
    beyond them the tables and the config's `vocab_size` grow. Where the tokenizer has
    ids beyond the tables already, these get rows too, and `tokens` may be empty. All
    other tensors and side files keep their bytes. `special` tokens are left out when
    text is decoded without specials.

        >>> import dew
        >>> source = dew.load(FOLDER)
        >>> folder = dew.extend_vocabulary(source, ["<tool>", "<call>"], "extended")
        >>> extended = dew.load(folder)
        >>> extended.config["vocab_size"], extended.tokenizer.token_to_id("<call>")
        (99, 98)

    Raises:
        ValueError: a token is empty, repeated or in the vocabulary already, the model
            has no tokenizer, or the folder exists; the message lists all faults.
    """
    extension = _Extension(source, tuple(tokens), special)
    extension.check()
    target = FilePath(folder).expanduser().absolute()
    with write_atomically(target) as partial:
        extension.write(partial)
    return target


@dataclass(frozen=True)
class _Extension:
    """A model, its new tokens, and the files they change."""

    source: Pretrained
    tokens: tuple[str, ...]
    special: bool

    def check(self) -> None:
        """Raises one error that lists every fault."""
        source = self.source
        if source.road != "native" or isinstance(source, Adapted | Padded):
            raise ValueError(
                f"{source.address}: a vocabulary is extended in a plain folder, on the "
                "native road; save the model as one, and load that"
            )
        if source.tokenizer is None:
            raise ValueError(f"{source.address} has no {TOKENIZER} to add tokens to")
        has_rows = max(self._old_ids.values()) < self._rows
        faults = ["no tokens were given"] if not self.tokens and has_rows else []
        faults += [f"{t!r} is empty" for t in self.tokens if not t.strip()]
        faults += [
            f"{token!r} is given {self.tokens.count(token)} times"
            for token in dict.fromkeys(self.tokens)
            if self.tokens.count(token) > 1
        ]
        faults += [
            f"{token!r} has the id {self._old_ids[token]} already"
            for token in self.tokens
            if token in self._old_ids
        ]
        ties = source.ties
        if ties.edits or ties.dropped or ties.borrowed:
            faults.append("it was read with tied=…: save it and load that")
        if faults:
            raise ValueError(
                f"the vocabulary of {source.address} cannot be extended: "
                + "; ".join(faults)
            )

    @cached_property
    def _old_ids(self) -> Mapping[str, int]:
        assert self.source.tokenizer is not None
        return self.source.tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def _rows(self) -> int:
        return int(self.source.table.variables["params", "embed", "weight"][0])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The source's tokenizer with the new tokens."""
        assert self.source.tokenizer is not None
        tokenizer = Tokenizer.from_str(self.source.tokenizer.to_str())
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=self.special)
                for token in self.tokens
            ]
        )
        return tokenizer

    def _tokenizer_file(self) -> bytes:
        """The new tokenizer.json, with the truncation and padding of the old one."""
        written = Tokenizer.from_str(self.tokenizer.to_str())
        stored = Tokenizer.from_file(str(self.source.folder.path / TOKENIZER))
        if stored.truncation is not None:
            written.enable_truncation(**stored.truncation)
        if stored.padding is not None:
            written.enable_padding(**stored.padding)
        return written.to_str(pretty=True).encode()

    @cached_property
    def _new_ids(self) -> dict[str, int]:
        """The ids of the new tokens."""
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        return {token: ids[token] for token in self.tokens}

    @property
    def rows(self) -> int:
        """Rows of the tables with the new tokens."""
        ids = (*self._old_ids.values(), *self._new_ids.values())
        return max(self._rows, max(ids) + 1)

    @cached_property
    def _token_tables(self) -> frozenset[str]:
        """Stored tensors that have one row for each token."""
        sources = self.source.table.sources.items()
        return frozenset(n for n, pieces in sources if has_token_rows(pieces[0].target))

    def write(self, folder: FilePath) -> None:
        """Writes the extended model's files into an empty folder."""
        weights = self.source.folder.weights
        specs = {
            file: [self._spec(name) for name in names]
            for file, names in weights.files.items()
        }
        index = None
        if weights.index is not None:
            index = json.loads(weights.index)
            total = sum(spec.size_bytes for file in specs.values() for spec in file)
            index["metadata"] = {**index.get("metadata", {}), "total_size": total}
        write_folder(
            folder,
            specs,
            self._values,
            config=json_bytes({**self.source.config, **self._config()}),
            side_files=self._side_files(),
            index=None if index is None else json_bytes(index),
            metadata=weights.metadata,
            release=weights.release,
        )

    def _spec(self, name: str) -> Spec:
        weights = self.source.folder.weights
        shape = tuple(weights.entries[name].shape)
        if name in self._token_tables:
            shape = (self.rows, *shape[1:])
        return Spec(name=name, dtype=weights.dtype(name), shape=shape)

    def _values(self, name: str) -> np.ndarray:
        stored = self.source.folder.weights.view(name)
        if name not in self._token_tables:
            return stored
        # Ids may have gaps and tables spare rows, which would distort the mean: it is
        # taken over ids with a token, each once should two spellings share an id.
        old_ids = np.fromiter(self._old_ids.values(), np.int64)
        old_ids = np.unique(old_ids[old_ids < len(stored)])
        mean = stored[old_ids].mean(axis=0, dtype=np.float64)
        rows = np.zeros((self.rows, *stored.shape[1:]), stored.dtype)
        rows[: len(stored)] = stored
        # Added rows without a token, as between spare ones, are means too.
        rows[len(stored) :] = mean.astype(stored.dtype)
        # New ids may be spare rows, which hold whatever the model was padded with.
        rows[list(self._new_ids.values())] = mean.astype(stored.dtype)
        return rows

    def _config(self) -> dict[str, Any]:
        """Returns the number of tokens under the name that config.json has for it."""
        family = family_of(self.source.config, self.source.address)
        (name,) = (
            name
            for name, entry in family.fields.items()
            for use in (entry.uses if isinstance(entry, MultiUse) else (entry,))
            if isinstance(use, Use) and use.to == "vocab"
        )
        return {name: self.rows}

    def _side_files(self) -> dict[str, FilePath | bytes]:
        """Returns the source's side files, with the new tokens in those that list them.

        transformers reads tokens from up to three files, and warns or fails where they
        disagree; the two older ones are amended only where the source has them.
        """
        path = self.source.folder.path
        files: dict[str, FilePath | bytes] = {**copied_files(path)}
        files[TOKENIZER] = self._tokenizer_file()
        descriptions = {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": self.special,
            }
            for token, i in self._new_ids.items()
        }
        config = read_json(path / TOKENIZER_CONFIG)
        if ADDED in config:
            files[TOKENIZER_CONFIG] = json_bytes(
                {**config, ADDED: {**config[ADDED], **descriptions}}
            )
        if ADDED_TOKENS in files:
            added = read_json(path / ADDED_TOKENS)
            files[ADDED_TOKENS] = json_bytes({**added, **self._new_ids})
        return files


@dataclass(frozen=True, kw_only=True)
class Padded(Pretrained):
    """A model whose token tables end with padding rows.

    Padding rows make no logits, so losses are those without them; they are not written
    into folders.
    """

    base: Pretrained = field(repr=False)

    def plain(self, variables: Variables) -> tuple[Pretrained, Variables]:
        """Returns the model and its variables without the padding rows."""
        shapes = self.base.table.variables
        leaves = flatten(variables)
        for path, leaf in leaves.items():
            if has_token_rows(path):
                leaves[path] = leaf[: shapes[path][0]]
        return self.base.plain(unflatten(leaves))


def pad_vocabulary(
    source: Pretrained, multiple: int, *, shardings: Shardings | None = None
) -> Pretrained:
    """Pads a native decoder's token tables to a multiple, for an even split on devices.

    The new rows are zeros and stay so: they make no logits and get no gradient. Exports
    leave them out, and the config's `vocab_size` does not change.

        >>> import dew, numpy as np
        >>> source = dew.load(FOLDER)
        >>> padded = dew.pad_vocabulary(source, 64)
        >>> padded.variables["params"]["embed"]["weight"].shape
        (128, 32)
        >>> padded.logits(np.array([[1, 2, 3]])).shape
        (1, 3, 97)

    With `shardings`, as `dew.load` takes them, padded tables are placed by them.

    Raises:
        ValueError: the multiple is less than 1, or the model is not a native decoder,
            or is padded or adapted already: pad first, then adapt.
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
    sharding_of = sharding_function(shardings)
    for path, leaf in leaves.items():
        if has_token_rows(path):
            leaves[path] = _padded(leaf, padding, partial(sharding_of, path))
    attributes = {f.name: getattr(source, f.name) for f in fields(Pretrained)}
    config = replace(model.config, extra_rows=padding)
    return Padded(
        **{
            **attributes,
            "model": model.clone(config=config),
            "variables": unflatten(leaves),
        },
        base=source,
    )


def _padded(
    leaf: jax.Array,
    padding: int,
    sharding_of: Callable[[tuple[int, ...]], jax.sharding.Sharding | None],
) -> jax.Array:
    """Returns a table with rows of zeros after its own."""
    widths = [(0, padding), *[(0, 0)] * (leaf.ndim - 1)]
    sharding = sharding_of((leaf.shape[0] + padding, *leaf.shape[1:]))
    if sharding is None:
        return jnp.pad(leaf, widths)
    # Compiled as one step, so that no device has the whole table in between.
    return jax.jit(partial(jnp.pad, pad_width=widths), out_shardings=sharding)(leaf)
