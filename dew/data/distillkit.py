"""Teachers' scores in DistillKit's parquet layout, as its public data sets have them.

A row is one text. `input_ids` are its tokens; for every token but the first,
`bytepacked_indices` hold the k likeliest tokens in its place and `compressed_logprobs`
their log-probabilities, both as bytes. What the bytes mean is said by
`compression_config.yaml` beside the files. In a second, plain form `token_ids` and
`top_values` hold the same k as numbers.

Facts of the layout: tokens are packed in ceil(log2 d) bits each, the highest bit first.
Log-probabilities are, end to end and little-endian: the first `exact_k` as numbers; the
coefficients of a polynomial in the place, counted from 0, that stands for the others;
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

Real = Literal["float16", "bfloat16", "float32", "float64"]
Power = int | Literal["sqrt", "exp"]

DTYPES: Mapping[str, np.dtype] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
CONFIG = "compression_config.yaml"


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Residuals of `num_elements` places, in `element_bits` each, and their scale."""

    scale_dtype: Real
    element_bits: int
    num_elements: int

    def read(
        self, raw: UInt8[np.ndarray, "seq bytes"]
    ) -> Float[np.ndarray, "seq elements"]:
        """The residuals of every token."""
        size = DTYPES[self.scale_dtype].itemsize
        scale = _numbers(raw[:, :size], self.scale_dtype)
        whole = unpacked(raw[:, size:], self.element_bits, self.num_elements)
        if self.element_bits == 1:
            return (2.0 * whole - 1) * scale
        return (whole - 2 ** (self.element_bits - 1)) * scale

    @property
    def size_bytes(self) -> int:
        """Bytes of a token."""
        packed = (self.element_bits * self.num_elements + 7) // 8
        return DTYPES[self.scale_dtype].itemsize + packed


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How k log-probabilities of `d` lie in bytes; the fields have DistillKit's names.

    `error_diffusion` only says how they were rounded.
    """

    d: int
    k: int
    exact_k: int
    exact_dtype: Real = "float32"
    polynomial_terms: tuple[Power, ...] = ()
    term_dtype: Real = "float32"
    residual_bins: tuple[Bin, ...] = ()
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False

    @classmethod
    def read(cls, file: str | Path) -> "Compression":
        """Reads a `compression_config.yaml`.

        Raises:
            ValueError: it has fields that this layout does not know.
        """
        import yaml

        raw = dict(yaml.safe_load(Path(file).read_text(encoding="utf-8")))
        unknown = sorted(set(raw) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"{file} has fields that are not known: {unknown}")
        bins = tuple(Bin(**one) for one in raw.pop("residual_bins", None) or ())
        terms = tuple(raw.pop("polynomial_terms", None) or ())
        return cls(**raw, residual_bins=bins, polynomial_terms=terms)

    @property
    def id_bits(self) -> int:
        """Bits of one token."""
        return math.ceil(math.log2(self.d))

    def ids(self, raw: UInt8[np.ndarray, "seq bytes"]) -> Int[np.ndarray, "seq k"]:
        """The k tokens of every place."""
        return unpacked(raw, self.id_bits, self.k)

    def log_probs(
        self, raw: UInt8[np.ndarray, "seq bytes"]
    ) -> Float[np.ndarray, "seq k"]:
        """Their log-probabilities, in float64."""
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
        whole = np.concatenate([exact, others], axis=1)
        return np.cumsum(whole, axis=1) if self.delta_encoding else whole

    def _powers(self) -> Float[np.ndarray, "others terms"]:
        """Every term of the polynomial at every place."""
        count = self.k - self.exact_k
        t = np.linspace(0, 1, count) if self.normalize_t else np.arange(float(count))
        named = {"sqrt": np.sqrt, "exp": np.exp}
        columns = [
            named[term](t) if isinstance(term, str) else t**term
            for term in self.polynomial_terms
        ]
        return np.stack(columns, axis=1) if columns else np.zeros((count, 0))


def unpacked(
    raw: UInt8[np.ndarray, "seq bytes"], bits: int, count: int
) -> Int[np.ndarray, "seq count"]:
    """`count` integers of `bits` each from every row, the highest bit first.

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
    """A text's tokens, and what the teacher said in the place of each next one."""

    tokens: Int[np.ndarray, " seq"]
    ids: Int[np.ndarray, "seq k"]
    log_probs: Float[np.ndarray, "seq k"]
    tail: Float[np.ndarray, " seq"]

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "Text":
        """A stretch of it."""
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
    """The texts of parquet files in DistillKit's layout, in order.

    Without `compression` they must have the plain form. Log-probabilities leave what
    they lack to a sum of one to a tail; an approximation that exceeds one is scaled
    down and has none. Of logits, `is_logits`, nobody can say what the k lack: they are
    taken as all there is.

    Raises:
        ValueError: a file has neither form.
    """
    import pyarrow.parquet as parquet

    for file in files:
        opened = parquet.ParquetFile(file)
        names = set(opened.schema_arrow.names)
        plain = {"input_ids", "token_ids", "top_values"}
        packed = {"input_ids", "compressed_logprobs", "bytepacked_indices"}
        wanted = plain if compression is None else packed
        if not wanted <= names:
            raise ValueError(
                f"{file} must have the columns {', '.join(sorted(wanted))}, it has "
                f"{', '.join(sorted(names))}"
            )
        for batch in opened.iter_batches(batch_size=8, columns=sorted(wanted)):
            for row in batch.to_pylist():
                yield _text(row, compression, is_logits)


def packed_rows(texts: Iterator[Text], seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Rows of `seq_len` tokens, texts end to end, as a batch of one that a cache takes.

    A text that crosses the end of a row goes on in the next as one of its own.
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
    values, tail = _normalised(values, is_logits=is_logits)
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


def _normalised(
    values: Float[np.ndarray, "seq k"], *, is_logits: bool
) -> tuple[Float[np.ndarray, "seq k"], Float[np.ndarray, " seq"]]:
    """Log-probabilities, and the log of the mass that they leave."""
    peak = values.max(axis=1, keepdims=True)
    total = peak + np.log(np.exp(values - peak).sum(axis=1, keepdims=True))
    over = (total >= 0) | is_logits
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
    """Bytes as numbers, in float64."""
    return np.ascontiguousarray(raw).view(DTYPES[dtype]).astype(np.float64)
