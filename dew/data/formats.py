"""Indexers of text files: the byte span of each document, and the file's faults.

Every file is read once, completely, when it is opened: that runs at 80 to 140 MB/s on
one core, some thirty times faster than tokenizing it, and names a bad line before the
first step instead of hours into a run.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Int64

_FAULTS_SHOWN = 10
# A tokenizer takes a document whole, at 120 bytes of memory a character.
_DOCUMENT_LIMIT_BYTES = 2**26


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """A local, uncompressed file to be indexed, with its `name` in error messages.

    `spool` is a path that may be written, for formats without random access.
    """

    name: str
    path: Path
    text_field: str
    spool: Path


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """The byte spans of a file's documents, and the decoder of their text."""

    name: str
    path: Path
    spans: Int64[np.ndarray, "documents 2"]
    decode: Callable[[bytes], str]
    faults: tuple[str, ...] = ()

    def read(self, index: int) -> str:
        """Returns one document; thread-safe, and holds no file open between calls."""
        start, stop = self.spans[index].tolist()
        with self.path.open("rb") as file:
            file.seek(start)
            raw = file.read(stop - start)
        try:
            return self.decode(raw)
        except ValueError as fault:
            raise ValueError(
                f"{self.name} changed since it was opened: document {index} is now "
                f"{fault}; open it again"
            ) from fault


def index_txt(raw: RawFile) -> TextFile:
    """Indexes a file of plain text as one document."""
    content = raw.path.read_bytes()
    try:
        faults = [] if plain_text(content).strip() else [f"{raw.name} is empty"]
    except ValueError as fault:
        faults = [f"{raw.name} is {fault}"]
    return _text_file(raw, raw.path, array("q", (0, len(content))), plain_text, faults)


def index_jsonl(raw: RawFile) -> TextFile:
    """Indexes each line of JSON as one document; blank lines are skipped."""
    decode = partial(json_text, field=raw.text_field)
    spans, faults, start = array("q"), [], 0
    with raw.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            stop = start + len(line)
            if line.strip():
                spans.extend((start, stop))
                try:
                    decode(line)
                except ValueError as fault:
                    faults.append(f"{raw.name}:{number} is {fault}")
            start = stop
    return _text_file(raw, raw.path, spans, decode, faults)


def index_parquet(raw: RawFile) -> TextFile:
    """Indexes each row as one document, copied as plain text into the spool file.

    Reading one row of a parquet file decodes its whole row group, which reading in
    shuffled order would do once per document.
    """
    spans, faults = array("q"), []
    try:
        with raw.spool.open("wb") as spool:
            for row, text in enumerate(_parquet_texts(raw)):
                spans.extend(_append(spool, text))
                if text is None:
                    faults.append(
                        f"{raw.name} row {row} is null in column {raw.text_field!r}"
                    )
    except ValueError as fault:
        faults.append(f"{raw.name} is {fault}")
    return _text_file(raw, raw.spool, spans, plain_text, faults)


KINDS: Mapping[str, Callable[[RawFile], TextFile]] = {
    ".txt": index_txt,
    ".jsonl": index_jsonl,
    ".parquet": index_parquet,
}
"""The indexer of each format, by the file's suffix before any `.gz`."""


def plain_text(raw: bytes) -> str:
    """Decodes UTF-8, with or without a byte order mark.

    Raises:
        ValueError: the bytes are not UTF-8; the message completes "the file is".
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ValueError(
            f"not UTF-8 (byte {raw[fault.start]:#04x} at offset {fault.start}); "
            "convert it to UTF-8"
        ) from fault


def json_text(raw: bytes, *, field: str) -> str:
    """Returns the string that a JSON object holds under `field`.

    Raises:
        ValueError: there is none; the message completes "the line is".
    """
    line = plain_text(raw)
    try:
        record = json.loads(line)
    except json.JSONDecodeError as fault:
        raise ValueError(f"not JSON: {fault.msg} at column {fault.colno}") from fault
    if not isinstance(record, dict):
        raise ValueError(
            f"a JSON {type(record).__name__}, and must be an object with a field "
            f"{field!r}"
        )
    if field not in record:
        raise ValueError(f"without a field {field!r}; {_nearest(field, list(record))}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(
            f"without text: its field {field!r} must be a string, got "
            f"{type(text).__name__}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        # An escape such as \ud800 alone is legal JSON, but no tokenizer can take it.
        raise ValueError(
            f"not text: its field {field!r} holds half a surrogate pair, "
            f"{text[fault.start]!a} at character {fault.start}"
        ) from fault
    return text


def _parquet_texts(raw: RawFile) -> Iterator[str | None]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as fault:
        raise ValueError(
            "a parquet file, which pyarrow reads: pip install 'dew-bridge[parquet]'"
        ) from fault
    try:
        table = parquet.ParquetFile(raw.path)
    except arrow.ArrowInvalid as fault:
        raise ValueError(f"not a parquet file: {fault}") from fault
    with table:
        schema = table.schema_arrow
        if raw.text_field not in schema.names:
            raise ValueError(
                f"without a column {raw.text_field!r}; "
                f"{_nearest(raw.text_field, schema.names)}"
            )
        kind = schema.field(raw.text_field).type
        if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
            raise ValueError(
                f"without text: its column {raw.text_field!r} must hold strings, "
                f"got {kind}"
            )
        for batch in table.iter_batches(batch_size=1024, columns=[raw.text_field]):
            yield from batch.column(0).to_pylist()


def _append(spool: BinaryIO, text: str | None) -> tuple[int, int]:
    start = spool.tell()
    return start, start + spool.write((text or "").encode())


def _text_file(
    raw: RawFile,
    path: Path,
    flat: "array[int]",
    decode: Callable[[bytes], str],
    faults: Sequence[str],
) -> TextFile:
    spans = np.fromiter(flat, np.int64, len(flat)).reshape(-1, 2)
    faults = list(faults)
    if not len(spans) and not faults:
        faults = [f"{raw.name} is empty"]
    for index in np.flatnonzero(np.diff(spans)[:, 0] > _DOCUMENT_LIMIT_BYTES):
        size = np.diff(spans[index]).item()
        faults.append(
            f"{raw.name} has a document of {size / 2**20:.0f} MiB (number {index}); "
            f"split it into documents of at most {_DOCUMENT_LIMIT_BYTES // 2**20} MiB, "
            "as lines of a .jsonl file, for a document is tokenized whole"
        )
    if len(faults) > _FAULTS_SHOWN:
        more = len(faults) - _FAULTS_SHOWN
        faults = [*faults[:_FAULTS_SHOWN], f"{raw.name} has {more} more faults"]
    return TextFile(
        name=raw.name, path=path, spans=spans, decode=decode, faults=tuple(faults)
    )


def _nearest(name: str, names: list[str]) -> str:
    close = get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"it has {', '.join(map(repr, names[:8])) or 'none at all'}"
