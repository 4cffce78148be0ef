"""What is wrong with a safetensors file that the `safetensors` package refuses.

The package stops at the first fault, often without the tensor's name. The header is
read once more here, and all of its faults are listed, with names and bytes, for one
error message.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

Record: TypeAlias = tuple[str, Sequence[tuple[str, Any]]]
"""A tensor's name, and the names and values that describe it."""

_WRAPPINGS = ("Error while deserializing header: ", "invalid JSON in header: ")
_LINE = 300
"""Characters of a fault: a damaged header may hold shapes of any length."""


def header_faults(
    file: Path, refusal: Exception, bits: Mapping[str, int]
) -> tuple[str, ...]:
    """Lists the faults of a file that safetensors refused to open, a line each.

    Args:
        file: the refused file.
        refusal: safetensors' error, which is the fault where nothing else is found.
        bits: the size of an element in bits, by the dtype's name in the format.
    """
    reason = str(refusal)
    for wrapping in _WRAPPINGS:
        reason = reason.removeprefix(wrapping)
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        # A length beyond the file's end is no length: these may be any bytes.
        text = stream.read(length) if length <= size - 8 else b""
    if not text:
        faults = [_no_header(length, size, reason)]
    else:
        faults = [*_text_faults(text, size - 8 - length, bits)]
        faults = faults or [f"the header is refused: {reason}"]
    return tuple(_line(f"{file.name}: {fault}") for fault in faults)


def _line(fault: str) -> str:
    """Returns a fault on one line, whatever the names in it."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in fault[:_LINE])
    return shown + ("…" if len(fault) > _LINE else "")


def _no_header(length: int, size: int, reason: str) -> str:
    fault = f"the file is no safetensors file: {size} bytes hold no header"
    if reason == "invalid header length":
        return f"{fault} of the {length} bytes it announces; it was cut short"
    return fault


def _text_faults(text: bytes, size: int, bits: Mapping[str, int]) -> Iterator[str]:
    """Lists the faults of a header before `size` bytes of data."""
    try:
        # Pairs as a tuple tell an object from an array, and show repeated names.
        pairs = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        yield f"the header is not JSON: {error}"
        return
    if type(pairs) is not tuple:
        yield f"the header is not JSON of one object, but {type(pairs).__name__}"
        return
    counts = Counter(name for name, _ in pairs)
    yield from (f"the header names {n} twice" for n in counts if counts[n] > 1)
    tensors = [(name, facts) for name, facts in pairs if name != "__metadata__"]
    odd = [(name, fault) for name, x in tensors if (fault := _record_fault(x, bits))]
    yield from (f"{name} {fault}" for name, fault in odd)
    if not odd:
        yield from _layout_faults(tensors, size)


def _record_fault(pairs: Any, bits: Mapping[str, int]) -> str | None:
    """Returns the fault of one tensor's record, regardless of the others."""
    facts = dict(pairs) if type(pairs) is tuple else {}
    dtype, shape, offsets = (facts.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not (type(dtype) is str and _is_counts(shape) and _is_counts(offsets)):
        return f"is not described by dtype, shape and two offsets: {facts or pairs}"
    if len(offsets) != 2:
        return f"must have two offsets, got {offsets}"
    if dtype not in bits:
        return f"is {dtype}; the dtypes of the format are {', '.join(sorted(bits))}"
    num_bits, span = math.prod(shape) * bits[dtype], offsets[1] - offsets[0]
    if num_bits != 8 * span:
        size = f", {num_bits // 8} bytes" if num_bits < 2**64 else ""
        return f"is {dtype}{shape}{size}, but its offsets span {span}"
    return None


def _is_counts(numbers: object) -> TypeGuard[list[int]]:
    return type(numbers) is list and all(type(n) is int and n >= 0 for n in numbers)


def _layout_faults(tensors: Sequence[Record], size: int) -> Iterator[str]:
    """Lists overlaps, gaps, and tensors that reach past the end of the data."""
    spans = [(dict(facts)["data_offsets"], name) for name, facts in tensors]
    at = 0
    for (start, end), name in sorted(spans):
        if start != at:
            kind = "overlaps the tensor before it" if start < at else "leaves a gap"
            yield f"{name} {kind}: it starts at byte {start} of the data, expected {at}"
        at = max(at, end)
    if at > size:
        yield f"the file is cut short: its tensors end at byte {at} of {size}"
    elif at < size:
        yield f"the file has {size - at} bytes that belong to no tensor"
