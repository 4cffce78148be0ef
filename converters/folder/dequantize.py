"""Conversion of quantised folders to plain ones, in numpy, one tensor at a time.

Read are formats whose value is a number of 8 or 4 bits times a scale. Products are
float32 and rounded once, to the dtype of the config. Methods that need their own code
(GPTQ, AWQ, bitsandbytes) are refused by name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dew.converters.folder.cache import cached_folder
from dew.converters.folder.dtypes import convert_dtype
from dew.converters.folder.folder import CONFIG
from dew.converters.folder.safetensors import DTYPES, Spec
from dew.converters.folder.weights import Weights, read_weights
from dew.converters.folder.write import copied_files, json_bytes, write_folder

METHODS = ("fp8", "compressed-tensors", "mxfp4")
"""Methods of quantization_config that are read; `compressed-tensors` in float8 only."""

_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOAT4 = np.concatenate([_FLOAT4, -_FLOAT4])
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ACTIVATIONS = ("input_scale", "output_scale", "activation_scale", "k_scale", "v_scale")
"""Name ends of scales that belong to activations, not to weights."""


def dequantise_folder(folder: Path) -> Path:
    """Returns a cached copy with plain weights; the folder itself if it has those.

    Raises:
        ValueError: its method is not in `METHODS`, or a packed tensor has no scale.
    """
    file = folder / CONFIG
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    quantisation = config.get("quantization_config") or {}
    weights = read_weights(folder) if quantisation else None
    if weights is None:
        return folder
    method = quantisation.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"{folder} is quantised with {method!r}, and only {', '.join(METHODS)} can "
            "be dequantised here; load it in transformers, dequantise and save that"
        )
    plain = {name: x for name, x in config.items() if name != "quantization_config"}
    stated = str(plain.get("dtype", plain.get("torch_dtype", "bfloat16")))
    plan = _plan(weights, DTYPES[_DTYPES.get(stated, "BF16")], quantisation)

    tensors = {name: tensor.file for name, tensor in plan.items()}
    index = {"metadata": {}, "weight_map": tensors}

    def convert(partial: Path) -> None:
        write_folder(
            partial,
            {
                file: [tensor.spec for tensor in plan.values() if tensor.file == file]
                for file in weights.files
            },
            lambda name: plan[name].values(),
            config=json_bytes(plain),
            side_files=copied_files(folder),
            index=None if weights.index is None else json_bytes(index),
        )

    files = [folder / name for name in weights.files]
    return cached_folder([file, *files], "dequantised", convert)


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """A tensor to be written, the file it goes into, and its dequantised values."""

    spec: Spec
    file: str
    values: Callable[[], np.ndarray]


def _plan(
    weights: Weights, dtype: np.dtype, quantisation: Mapping[str, Any]
) -> dict[str, _Plain]:
    """Returns the tensors to write; scales are multiplied in and not written."""
    faults = list(weights.faults)
    plan: dict[str, _Plain] = {}
    packed: set[str] = set()
    for name, entry in weights.entries.items():
        stem = name.removesuffix("_blocks")
        if name.endswith("_blocks") and f"{stem}_scales" in weights.entries:
            experts, rows, groups, half = entry.shape
            shape = (experts, groups * half * 2, rows)
            target, scale, widen = stem, f"{stem}_scales", _widen_float4
        elif entry.dtype.startswith("F8"):
            ends = ("_scale_inv", "_scale")
            scales = [name + end for end in ends if name + end in weights.entries]
            if not scales:
                faults.append(f"{name} is {entry.dtype} and has no {name}_scale_inv")
                continue
            block = quantisation.get("weight_block_size")
            target, scale, shape = name, scales[0], entry.shape
            widen = _widen_by_scale(block)
        else:
            continue
        packed |= {name, scale}
        plan[target] = _Plain(
            spec=Spec(name=target, dtype=dtype, shape=shape),
            file=entry.file.name,
            values=_reader(weights, name, scale, widen, dtype),
        )
    if faults:
        raise ValueError("cannot be dequantised: " + "; ".join(faults[:8]))
    for name, entry in weights.entries.items():
        if name not in packed and not name.endswith(_ACTIVATIONS):
            spec = Spec(name=name, dtype=weights.dtype(name), shape=entry.shape)
            plan[name] = _Plain(
                spec=spec,
                file=entry.file.name,
                values=lambda name=name: weights.view(name),
            )
    return plan


Widen = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function of packed numbers and their scales that returns float32 values."""


def _reader(
    weights: Weights, name: str, scale: str, widen: Widen, dtype: np.dtype
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        wide = widen(weights.view(name), weights.view(scale))
        weights.release(name)
        return convert_dtype(wide, dtype)

    return read


def _widen_by_scale(block: list[int] | None) -> Widen:
    def widen(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
        scales = scales.astype(np.float32)
        if block is not None and scales.ndim == packed.ndim >= 2:
            for axis, size in zip((-2, -1), block, strict=True):
                count = packed.shape[axis]
                scales = np.repeat(scales, size, axis=axis)
                scales = scales.take(range(count), axis=axis)
        elif scales.ndim == 1 and scales.size > 1:
            scales = scales.reshape(-1, *[1] * (packed.ndim - 1))
        wide = packed.astype(np.float32)
        wide *= scales
        return wide

    return widen


def _widen_float4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Unpacks two numbers a byte, the low one first; 32 share a power of two."""
    experts, rows, groups, half = blocks.shape
    wide = np.empty((experts, rows, groups, half, 2), np.float32)
    wide[..., 0] = _FLOAT4[blocks & 0x0F]
    wide[..., 1] = _FLOAT4[blocks >> 4]
    wide = np.ldexp(wide, scales.astype(np.int32)[..., None, None] - 127)
    # gpt-oss stores its plain matrices with inputs first.
    return wide.reshape(experts, rows, -1).swapaxes(1, 2)
