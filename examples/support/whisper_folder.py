"""Conversion of Whisper from a CTranslate2 file to a Hugging Face folder.

CTranslate2 fuses an attention's projections and names tensors in its own way; values
are those that OpenAI published, in float16, and are not changed.
"""

import json
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_DTYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
_PARTS = {
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": tuple(f"self_attn.{x}_proj" for x in "qkv"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""Names in transformers of a module, or of the modules that are fused in it."""
_LEAVES = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def whisper_folder(source: Path, folder: Path) -> None:
    """Writes `folder` from one with `model.bin`, `config.json` and `tokenizer.json`."""
    tensors = dict(_rename(_read_tensors(source / "model.bin")))
    side = {
        "config.json": _config(tensors),
        "preprocessor_config.json": _PREPROCESSOR,
        "tokenizer_config.json": _TOKENIZER,
        "generation_config.json": _generation(
            json.loads((source / "config.json").read_text(encoding="utf-8"))
        ),
    }
    folder.mkdir(parents=True)
    for name, content in side.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    shutil.copy(source / "tokenizer.json", folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a CTranslate2 file of version 6, without its aliases.

    Everything is little-endian: a name is a length and zero-terminated bytes, a
    tensor is its name, rank, lengths, dtype and bytes.
    """
    data, at = file.read_bytes(), 0

    def take(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", data, at)
        at += struct.calcsize(kind)
        return value

    def take_text() -> str:
        nonlocal at
        length = take("H")
        at += length
        return data[at - length : at - 1].decode()

    version, kind = take("I"), take_text()
    if (version, kind) != (6, "WhisperSpec"):
        raise ValueError(
            f"{file} must be a WhisperSpec of version 6, got {kind} of {version}"
        )
    take("I")
    tensors = {}
    for _ in range(take("I")):
        name = take_text()
        shape = [take("I") for _ in range(take("B"))]
        dtype, size = np.dtype(_DTYPES[take("B")]), take("I")
        flat = np.frombuffer(data, dtype, size // dtype.itemsize, at)
        tensors[name], at = flat.reshape(shape), at + size
    return tensors


def _rename(stored: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights under transformers' names, with fused ones split."""
    for name, tensor in stored.items():
        side, *parts, leaf = name.split("/")
        # Scalars are settings, which are in the config.
        if not tensor.ndim or name.startswith("decoder/alignment"):
            continue
        stem = f"model.{side}."
        if parts[0].startswith("layer_") and parts[0] != "layer_norm":
            stem += f"layers.{parts.pop(0).removeprefix('layer_')}."
        targets = _PARTS.get("/".join(parts), ("/".join(parts),))
        pieces = np.split(tensor, len(targets))
        for target, piece in zip(targets, pieces, strict=True):
            leaf = _LEAVES.get(leaf, leaf)
            # Whisper's key projections have no bias; the fused bias has zeros for them.
            if not (target.endswith("k_proj") and leaf == "bias"):
                yield f"{stem}{target}.{leaf}", np.ascontiguousarray(piece)


_END, _START = 50256, 50257
_IDS = {
    "bos_token_id": _END,
    "eos_token_id": _END,
    "pad_token_id": _END,
    "decoder_start_token_id": _START,
}


def _config(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the config by the tensors' sizes; a head is always 64 wide."""
    vocab, width = tensors["model.decoder.embed_tokens.weight"].shape
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": vocab,
        "d_model": width,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        "activation_function": "gelu",
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        **_IDS,
    }
    for side, positions in (("encoder", "source"), ("decoder", "target")):
        table = tensors[f"model.{side}.embed_positions.weight"]
        first = [n for n in tensors if n.startswith(f"model.{side}.layers.")]
        config |= {
            f"{side}_layers": len({name.split(".")[3] for name in first}),
            f"{side}_attention_heads": width // 64,
            f"{side}_ffn_dim": len(tensors[f"model.{side}.layers.0.fc1.bias"]),
            f"max_{positions}_positions": len(table),
        }
    return config


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_IDS,
        "max_length": 448,
        "no_timestamps_token_id": 50362,
        "is_multilingual": False,
        "suppress_tokens": config["suppress_ids"],
        "begin_suppress_tokens": config["suppress_ids_begin"],
        "alignment_heads": config["alignment_heads"],
    }


_PREPROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **{f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "pad", "unk")},
    "model_max_length": 1024,
}
