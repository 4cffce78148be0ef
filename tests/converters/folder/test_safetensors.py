"""Files of one format: ours and those of the safetensors package, read by both."""

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dew.converters.folder.safetensors import (
    DTYPES,
    MappedFile,
    Spec,
    read_header,
    write_arrays,
    write_file,
)
from dew.converters.folder.weights import read_weights

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [(3, 5), (64, 8), (7,), (), (0, 4)]


def arrays(dtype: np.dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"layers.{i}": rng.integers(0, 2, shape).astype(dtype)
        for i, shape in enumerate(SHAPES)
    }


def stream(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    specs = [Spec(name=n, dtype=x.dtype, shape=x.shape) for n, x in tensors.items()]
    write_file(file, specs, tensors.__getitem__, {"format": "pt"})


@pytest.mark.parametrize("write", [stream, write_arrays], ids=["stream", "arrays"])
@pytest.mark.parametrize("name", DTYPES)
def test_torch_reads_the_bits_of_every_dtype(
    name: str, write: Any, tmp_path: Path
) -> None:
    tensors = arrays(DTYPES[name])
    file = tmp_path / "x.safetensors"
    if write is stream:
        stream(file, tensors)
    else:
        write_arrays(file, tensors, {"format": "pt"})
    read = load_file(file)
    assert read.keys() == tensors.keys()
    for key, tensor in read.items():
        # A tensor without axes has no view of another size.
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert (tuple(tensor.shape), raw) == (
            tensors[key].shape,
            tensors[key].tobytes(),
        )
    with safe_open(file, "np") as opened:
        assert {opened.get_slice(key).get_dtype() for key in tensors} == {name}
        assert opened.metadata() == {"format": "pt"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize("name", DTYPES)
def test_views_have_the_bits_of_every_dtype_that_torch_writes(
    name: str, tmp_path: Path
) -> None:
    tensors = arrays(DTYPES[name])
    written = write_by_torch(tmp_path / "x.safetensors", name, tensors)
    header = read_header(written)
    mapped = MappedFile(written)
    assert {entry.name for entry in header.entries} == tensors.keys()
    for entry in header.entries:
        view, want = mapped.view(entry), tensors[entry.name]
        assert (view.dtype, view.shape) == (want.dtype, want.shape)
        assert view.tobytes() == want.tobytes()
        assert not view.flags.owndata or not view.size


def write_by_torch(file: Path, name: str, tensors: Mapping[str, np.ndarray]) -> Path:
    """Writes arrays by torch's own function, with their bits as torch's dtype."""
    names = {"BOOL": "bool", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
    names |= {"F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
    dtype = getattr(torch, names.get(name, DTYPES[name].name))
    raw = {
        n: torch.frombuffer(bytearray(x.tobytes()), dtype=dtype).reshape(x.shape)
        if x.size
        else torch.zeros(x.shape, dtype=dtype)
        for n, x in tensors.items()
    }
    save_file(raw, file)
    return file


def test_transposed_arrays_are_written_by_their_axes(tmp_path: Path) -> None:
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {"a": given.T, "b": given[:, ::2]}
    kept = dict(tensors)
    write_arrays(tmp_path / "x.safetensors", tensors, {})
    for name, read in load_file(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(read.numpy(), kept[name])
    assert all(tensors[name] is kept[name] for name in kept)


def test_streamed_tensors_are_in_memory_one_at_a_time(tmp_path: Path) -> None:
    names = [f"w{i}" for i in range(4)]
    log: list[tuple[str, str]] = []

    def values(name: str) -> np.ndarray:
        log.append(("value", name))
        return np.full((4, 16), names.index(name), np.float32)

    specs = [Spec(name=n, dtype=np.dtype(np.float32), shape=(4, 16)) for n in names]
    file = tmp_path / "x.safetensors"
    write_file(file, specs, values, {}, lambda name: log.append(("release", name)))
    assert log == [(step, n) for n in names for step in ("value", "release")]
    assert {entry.start % 64 for entry in read_header(file).entries} == {0}


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
GOOD = {"__metadata__": {"format": "pt"}, "a": A, "b": B}

DAMAGED = {
    "no dtype of the format": ({"a": A | {"dtype": "Q9"}}, "a is Q9; the dtypes of"),
    "a dtype that is no text": ({"a": A | {"dtype": 3}}, "a is not described by"),
    "a negative length": ({"a": A | {"shape": [-2]}}, "a is not described by"),
    "a length of 2.0": ({"a": A | {"shape": [2.0]}}, "a is not described by"),
    "one offset": ({"a": A | {"data_offsets": [0]}}, "a must have two offsets"),
    "offsets turned round": ({"a": A | {"data_offsets": [8, 0]}}, "offsets span -8"),
    "another size": ({"a": A | {"shape": [3]}}, "a is F32[3], 12 bytes, but its off"),
    "a size past 64 bits": ({"a": A | {"shape": [2**62, 8]}}, "its offsets span 8"),
    "a gap": ({"a": A, "b": B | {"shape": [1], "data_offsets": [12, 16]}}, "b leaves"),
    "an overlap": (
        {"a": A, "b": B | {"shape": [3], "data_offsets": [4, 16]}},
        "b overl",
    ),
    "bytes twice": ({"a": A, "b": A, "c": B}, "b overlaps the tensor before"),
    "no bytes": (GOOD | {"c": B | {"data_offsets": [16, 24]}}, "is cut short: its"),
    "bytes too many": ({"a": A}, "the file has 8 bytes that belong to no tensor"),
    "metadata of numbers": (GOOD | {"__metadata__": {"x": 1}}, "expected a string"),
    "a list": (["a"], "the header is not JSON of one object, but list"),
    "a name of two lines": ({"a\nb": A | {"shape": [3]}}, r"a\nb is F32[3]"),
}


def write(file: Path, header: object, data: bytes = b"0" * 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_safetensors_refuses_is_said_in_one_line(
    kind: str, tmp_path: Path
) -> None:
    header, words = DAMAGED[kind]
    file = write(tmp_path / "model.safetensors", header)
    with pytest.raises(SafetensorError):
        safe_open(file, "np")
    found = read_header(file)
    assert found.entries == ()
    assert [words in fault for fault in found.faults] == [True]
    assert found.faults[0].startswith("model.safetensors: ")
    assert found.faults[0].isprintable()
    with pytest.raises(ValueError, match="has damaged files; fetch or write them anew"):
        read_weights(tmp_path)


HEADS = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a length and no header": (100).to_bytes(8, "little") + b"{}",
    "a length past all files": (2**63).to_bytes(8, "little") + b"{}",
    "a header of no bytes": bytes(8),
    "brackets without end": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "no text": (3).to_bytes(8, "little") + b"\xff\xff\xff",
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_file_without_a_header_says_so_in_one_line(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(HEADS[kind])
    (fault,) = read_header(file).faults
    assert "is no safetensors file" in fault or "the header is not JSON" in fault
    assert fault.isprintable()


def test_all_faults_of_all_files_are_in_one_error(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": A | {"shape": [3]}, "b": B | {"dtype": 1}})
    write(tmp_path / "2.safetensors", {"c": A})
    index = {"weight_map": {n: f"{1 + (n == 'c')}.safetensors" for n in "abc"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="damaged") as error:
        read_weights(tmp_path)
    assert [line.split(" ")[2:4] for line in lines(error)] == [
        ["1.safetensors:", "a"],
        ["1.safetensors:", "b"],
        ["2.safetensors:", "the"],
    ]


def lines(error: pytest.ExceptionInfo[ValueError]) -> Iterator[str]:
    return iter(str(error.value).splitlines()[1:])


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F8_E4M3FNUZ", 8), ("C64", 64)],
)
def test_tensors_that_are_not_read_may_stand_between_others(
    dtype: str, bits: int, tmp_path: Path
) -> None:
    packed = {"dtype": dtype, "shape": [16], "data_offsets": [8, 8 + 2 * bits]}
    last = A | {"data_offsets": [8 + 2 * bits, 16 + 2 * bits]}
    numbers = np.array([1.5, -2], np.float32)
    data = bytes(8 + 2 * bits) + numbers.tobytes()
    file = write(tmp_path / "model.safetensors", {"a": A, "b": packed, "c": last}, data)
    weights = read_weights(tmp_path)
    assert weights is not None
    assert [entry.dtype for entry in weights.entries.values()] == ["F32", dtype, "F32"]
    np.testing.assert_array_equal(weights.view("c"), numbers)
    assert weights.entries["c"].end == file.stat().st_size
