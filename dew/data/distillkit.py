"""Teachers' scores in DistillKit's parquet layout, as its public data sets have them.

A row is one text. `input_ids` are its tokens; for every token but the first,
`bytepacked_indices` hold the k likeliest tokens in its place and `compressed_logprobs`
their log-probabilities, both as bytes. The format of the bytes is in
`compression_config.yaml` beside the files. In a second, plain form `token_ids` and
`top_values` hold the same k as numbers.

Facts of the layout: tokens are packed in ceil(log2 d) bits each, the highest bit first.
Log-probabilities are, end to end and little-endian: the first `exact_k` as numbers; the
coefficients of a polynomial in the rank, counted from 0, that approximates the others;
for each residual bin a scale and signed integers of `element_bits`, shifted to be
positive and packed as above, that are added to the next of those. With `delta_encoding`
all of it are differences to the value before.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, UInt8

FloatDtype = Literal["float16", "bfloat16", "float32", "float64"]
PolynomialTerm = int | Literal["sqrt", "exp"]

DTYPES: Mapping[str, np.dtype] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
CONFIG = "compression_config.yaml"


@dataclass(frozen=True, kw_only=True)
class ResidualBin:
    """The format of `num_elements` residuals: the bits of each, and their scale."""

    scale_dtype: FloatDtype
    element_bits: int
    num_elements: int

    def read(
        self, raw: UInt8[np.ndarray, "seq bytes"]
    ) -> Float[np.ndarray, "seq elements"]:
        """Returns the residuals of every token, in float64."""
        size = DTYPES[self.scale_dtype].itemsize
        scale = _numbers(raw[:, :size], self.scale_dtype)
        integers = unpack_bits(raw[:, size:], self.element_bits, self.num_elements)
        if self.element_bits == 1:
            return (2.0 * integers - 1) * scale
        return (integers - 2 ** (self.element_bits - 1)) * scale

    @property
    def size_bytes(self) -> int:
        """The bytes of one token's scale and residuals."""
        packed = (self.element_bits * self.num_elements + 7) // 8
        return DTYPES[self.scale_dtype].itemsize + packed


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The byte format of k log-probabilities of `d`, in DistillKit's field names.

    `error_diffusion` is about the writer's rounding and changes nothing for reading.
    """

    d: int
    k: int
    exact_k: int
    exact_dtype: FloatDtype = "float32"
    polynomial_terms: tuple[PolynomialTerm, ...] = ()
    term_dtype: FloatDtype = "float32"
    residual_bins: tuple[ResidualBin, ...] = ()
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False

    @classmethod
    def read(cls, file: str | Path) -> "Compression":
        """Reads the format from a `compression_config.yaml`.

        Raises:
            ValueError: it is no YAML, or has fields that this layout does not have.
        """
        import yaml

        try:
            raw = dict(yaml.safe_load(Path(file).read_text(encoding="utf-8")))
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(f"{file} is no YAML of fields: {error}") from error
        unknown = sorted(set(raw) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"{file} has fields that are not known: {unknown}")
        bins = tuple(ResidualBin(**one) for one in raw.pop("residual_bins", None) or ())
        terms = tuple(raw.pop("polynomial_terms", None) or ())
        return cls(**raw, residual_bins=bins, polynomial_terms=terms)

    @property
    def id_bits(self) -> int:
        """The bits of one token id."""
        return math.ceil(math.log2(self.d))

    def ids(self, raw: UInt8[np.ndarray, "seq bytes"]) -> Int[np.ndarray, "seq k"]:
        """Returns the k token ids of every position."""
        return unpack_bits(raw, self.id_bits, self.k)

    def log_probs(
        self, raw: UInt8[np.ndarray, "seq bytes"]
    ) -> Float[np.ndarray, "seq k"]:
        """Returns the log-probabilities of those k tokens, in float64."""
        # Parts stand end to end, so each is read off the front of what is left.
        rest, parts = raw, []
        for count, dtype in (
            (self.exact_k, self.exact_dtype),
            (len(self.polynomial_terms), self.term_dtype),
        ):
            size = count * DTYPES[dtype].itemsize
            parts.append(_numbers(rest[:, :size], dtype))
            rest = rest[:, size:]
        exact, coefficients = parts
        others = coefficients @ self._powers().T
        start = 0
        for one in self.residual_bins:
            stop = start + one.num_elements
            others[:, start:stop] += one.read(rest[:, : one.size_bytes])
            rest, start = rest[:, one.size_bytes :], stop
        values = np.concatenate([exact, others], axis=1)
        return np.cumsum(values, axis=1) if self.delta_encoding else values

    def _powers(self) -> Float[np.ndarray, "others terms"]:
        """Returns every term of the polynomial at every rank."""
        count = self.k - self.exact_k
        t = np.linspace(0, 1, count) if self.normalize_t else np.arange(float(count))
        functions = {"sqrt": np.sqrt, "exp": np.exp}
        columns = [
            functions[term](t) if isinstance(term, str) else t**term
            for term in self.polynomial_terms
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((count, 0))


def unpack_bits(
    raw: UInt8[np.ndarray, "seq bytes"], bits: int, count: int
) -> Int[np.ndarray, "seq count"]:
    """Reads `count` integers of `bits` each from every row, the highest bit first.

    Raises:
        ValueError: a row has too few bytes for that.
    """
    if raw.shape[1] * 8 < bits * count:
        raise ValueError(
            f"{count} numbers of {bits} bits need {-(-bits * count // 8)} bytes a "
            f"token, the file has {raw.shape[1]}; its compression is another one"
        )
    flags = np.unpackbits(raw, axis=1)[:, : bits * count]
    powers = 2 ** np.arange(bits - 1, -1, -1, dtype=np.int64)
    return flags.reshape(len(raw), count, bits) @ powers


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text's tokens, with the teacher's top k for the token after each.

    `tail` is the log of the probability that the k leave over.
    """

    tokens: Int[np.ndarray, " seq"]
    ids: Int[np.ndarray, "seq k"]
    log_probs: Float[np.ndarray, "seq k"]
    tail: Float[np.ndarray, " seq"]

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "Text":
        """Returns the text's positions from `start` to `stop`."""
        run = slice(start, stop)
        return Text(
            tokens=self.tokens[run],
            ids=self.ids[run],
            log_probs=self.log_probs[run],
            tail=self.tail[run],
        )


def captured_texts(
    files: Sequence[str | Path],
    compression: Compression | None,
    *,
    is_logits: bool = False,
) -> Iterator[Text]:
    """Yields the texts of parquet files in DistillKit's layout, in order.

    Without `compression` they must have the plain form. The probability that the k
    leave over is the tail; an approximation whose sum exceeds one is scaled down and
    has no tail. The mass outside k logits, `is_logits`, is unknown: they are normalised
    over the k.

    Raises:
        ValueError: a file has neither form.
    """
    import pyarrow.parquet as parquet

    for file in files:
        opened = parquet.ParquetFile(file)
        names = set(opened.schema_arrow.names)
        plain = {"input_ids", "token_ids", "top_values"}
        packed = {"input_ids", "compressed_logprobs", "bytepacked_indices"}
        columns = plain if compression is None else packed
        if not columns <= names:
            raise ValueError(
                f"{file} must have the columns {', '.join(sorted(columns))}, it has "
                f"{', '.join(sorted(names))}"
            )
        for batch in opened.iter_batches(batch_size=8, columns=sorted(columns)):
            for row in batch.to_pylist():
                yield _text(row, compression, is_logits)


def packed_rows(texts: Iterator[Text], seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields rows of `seq_len` tokens, texts end to end, as batches of one row.

    `CacheWriter.add` takes such batches. A text that crosses the end of a row continues
    in the next row as another segment.
    """
    row: list[Text] = []
    room = seq_len
    for text in texts:
        start = 0
        while start < len(text):
            row.append(text.part(start, start + room))
            start, room = start + len(row[-1]), room - len(row[-1])
            if not room:
                yield _row(row, seq_len)
                row, room = [], seq_len
    if row:
        yield _row(row, seq_len)


def _text(
    row: Mapping[str, Any], compression: Compression | None, is_logits: bool
) -> Text:
    tokens = np.asarray(row["input_ids"], np.int64)
    if compression is None:
        ids = np.asarray(row["token_ids"], np.int64)
        values = np.asarray(row["top_values"], np.float64)
    else:
        ids = compression.ids(np.asarray(row["bytepacked_indices"], np.uint8))
        raw = np.asarray(row["compressed_logprobs"], np.uint8)
        values = compression.log_probs(raw)
    values, tail = _normalise(values, is_logits=is_logits)
    # A capture has nothing at the last token, which predicts no other.
    missing = len(tokens) - len(ids)
    if missing not in (0, 1):
        raise ValueError(
            f"a text of {len(tokens)} tokens has scores of {len(ids)} places"
        )
    pad = ((0, missing), (0, 0))
    return Text(
        tokens=tokens,
        ids=np.pad(ids, pad),
        log_probs=np.pad(values, pad, constant_values=-np.inf),
        tail=np.pad(tail, (0, missing)),
    )


def _normalise(
    values: Float[np.ndarray, "seq k"], *, is_logits: bool
) -> tuple[Float[np.ndarray, "seq k"], Float[np.ndarray, " seq"]]:
    """Returns log-probabilities, and the log of the mass that they leave over."""
    peak = values.max(axis=1, keepdims=True)
    total = peak + np.log(np.exp(values - peak).sum(axis=1, keepdims=True))
    over = (total >= 0) | is_logits
    # expm1, for a sum near one: 1 - exp(total) would round to 0.
    left = np.log(-np.expm1(np.where(over, -1, total)))
    return np.where(over, values - total, values), np.where(over, -np.inf, left)[:, 0]


def _row(parts: Sequence[Text], seq_len: int) -> dict[str, np.ndarray]:
    used, k = sum(map(len, parts)), parts[0].ids.shape[1]
    numbers = np.repeat(np.arange(1, len(parts) + 1), [len(part) for part in parts])
    row = {
        "tokens": np.zeros(seq_len, np.int32),
        "segment_ids": np.zeros(seq_len, np.int32),
        "teacher_ids": np.zeros((seq_len, k), np.int32),
        "teacher_log_probs": np.full((seq_len, k), -np.inf, np.float32),
        "teacher_tail": np.zeros(seq_len, np.float32),
    }
    filled = {
        "tokens": [part.tokens for part in parts],
        "segment_ids": [numbers],
        "teacher_ids": [part.ids for part in parts],
        "teacher_log_probs": [part.log_probs for part in parts],
        "teacher_tail": [part.tail for part in parts],
    }
    for name, pieces in filled.items():
        row[name][:used] = np.concatenate(pieces)
    return {name: array[None] for name, array in row.items()}


def _numbers(
    raw: UInt8[np.ndarray, "seq bytes"], dtype: str
) -> Float[np.ndarray, "seq count"]:
    """Reads bytes as numbers of a dtype, in float64."""
    return np.ascontiguousarray(raw).view(DTYPES[dtype]).astype(np.float64)
