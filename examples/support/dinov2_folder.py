"""Conversion of DINOv2 from an ONNX file with its backbone to a Hugging Face folder.

The file is parsed as a protocol buffer, of which only the names of nodes and the bytes
of constants are needed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_GRAPH, _NODE, _CONSTANT = 7, 1, 5
_INPUT, _NODE_NAME = 1, 3
_FLOAT = 1
_PREFIX = "backbone."


def dinov2_folder(source: Path, folder: Path) -> None:
    """Writes `folder` from an ONNX file of a model on a DINOv2 backbone."""
    tensors = _read_tensors(source)
    folder.mkdir(parents=True)
    side = {"config.json": _config(tensors), "preprocessor_config.json": _PREPROCESSOR}
    for name, content in side.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _read_tensors(source: Path) -> dict[str, np.ndarray]:
    """Returns the backbone's weights under transformers' names.

    The exporter kept most names. Matrices are transposed and renamed, but the products
    that use them have their names, and the position table is in two parts.
    """
    (graph,) = (body for field, body in _fields(source.read_bytes()) if field == _GRAPH)
    constants, products = {}, {}
    for field, body in _fields(graph):
        if field == _CONSTANT:
            constants |= _constant(body)
        elif field == _NODE:
            node = list(_fields(body))
            inputs = [value.decode() for kind, value in node if kind == _INPUT]
            name = next((v.decode() for kind, v in node if kind == _NODE_NAME), "")
            if name.startswith("/backbone/") and name.endswith("/MatMul"):
                products[name] = inputs[1]
    tensors = {
        name.removeprefix(_PREFIX): value
        for name, value in constants.items()
        if name.startswith(_PREFIX)
    }
    for name, matrix in products.items():
        if matrix in constants:
            stem = name.removeprefix("/backbone/").removesuffix("/MatMul")
            tensors[stem.replace("/", ".") + ".weight"] = constants[matrix].T
    width = tensors["embeddings.cls_token"].shape[-1]
    tensors["embeddings.position_embeddings"] = _positions(constants, width)
    # The mask token is used in training with masked patches, and is not in the file.
    tensors["embeddings.mask_token"] = np.zeros((1, width), np.float32)
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def _positions(constants: Mapping[str, np.ndarray], width: int) -> np.ndarray:
    """Returns the position table: the class token's row, then the patches' grid."""
    loose = {
        name: value
        for name, value in constants.items()
        if name.startswith("onnx::") and value.shape[-1:] == (width,)
    }
    first = next(x for n, x in loose.items() if "Concat" in n and x.shape[:2] == (1, 1))
    grid = next(x for n, x in loose.items() if "Reshape" in n and x.size > width)
    return np.concatenate([first, grid.reshape(1, -1, width)], axis=1)


def _constant(body: bytes) -> dict[str, np.ndarray]:
    """Returns a float tensor by its name; an empty dict for other dtypes."""
    shape, kind, name, raw = [], 0, "", b""
    for field, value in _fields(body):
        match field:
            case 1:  # dims
                shape.append(value)
            case 2:  # data_type
                kind = value
            case 8:  # name
                name = value.decode()
            case 9:  # raw_data
                raw = value
    if kind != _FLOAT:
        return {}
    return {name: np.frombuffer(raw, "<f4").reshape(shape)}


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the numbers of a protocol buffer's fields, with integers or bytes."""
    view, at = memoryview(message), 0
    while at < len(view):
        key, at = _varint(view, at)
        match key & 7:
            case 0:
                value, at = _varint(view, at)
                yield key >> 3, value
            case 2:
                size, at = _varint(view, at)
                yield key >> 3, bytes(view[at : at + size])
                at += size
            case 5:
                at += 4
            case 1:
                at += 8
            case kind:
                raise ValueError(f"not a protocol buffer: type {kind} at byte {at}")


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Reads an integer of seven bits per byte, the lowest first."""
    value = shift = 0
    while True:
        byte = view[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _config(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the config by the tensors' sizes; a head is always 64 wide."""
    positions = tensors["embeddings.position_embeddings"].shape[1] - 1
    kernel = tensors["embeddings.patch_embeddings.projection.weight"].shape
    width, channels, patch, _ = kernel
    layers = {n.split(".")[2] for n in tensors if n.startswith("encoder.layer.")}
    hidden = tensors["encoder.layer.0.mlp.fc1.bias"].size
    return {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": width // 64,
        "mlp_ratio": hidden // width,
        "patch_size": patch,
        "image_size": round(positions**0.5) * patch,
        "num_channels": channels,
        "layer_norm_eps": 1e-6,
        "torch_dtype": "float32",
    }


_PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
