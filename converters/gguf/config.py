"""Config of a GGUF file's model: its metadata as the content of a config.json.

Every key below the architecture's name must be read here; a key that is not would
change what llama.cpp computes, so it is refused by name.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dew.converters.config.fields import Values
from dew.converters.gguf.architectures.table import ARCHITECTURES
from dew.converters.gguf.rope import rope_scaling
from dew.converters.gguf.rows import ALWAYS, NEVER, Arch

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor


class GGUFFile:
    """An open GGUF file that records which of its metadata have been read."""

    def __init__(self, reader: "GGUFReader") -> None:
        self.metadata = {key: _value(field) for key, field in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.name = str(self.metadata.get("general.architecture"))
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key` below the architecture's name, marked as read."""
        value = self.metadata.get(f"{self.name}.{key}", default)
        self._read.add(f"{self.name}.{key}")
        return value

    def values(self, name: str) -> np.ndarray | None:
        """Returns a tensor that holds settings, not weights; None if absent."""
        self._read.add(name)
        tensor = self.tensors.get(name)
        return None if tensor is None else floats(tensor, tensor.data)

    def weights(self) -> Iterator["ReaderTensor"]:
        """Yields the tensors that were not read as settings, in the file's order."""
        return (t for name, t in self.tensors.items() if name not in self._read)

    def check_all_read(self) -> None:
        """Refuses metadata that llama.cpp would use and that were not read.

        Only the architecture's own keys change the maths; other prefixes (`general`,
        `quantize`, an uploader's) describe the file.

        Raises:
            ValueError: unread keys, all of them named; a file that is not a model, or
                is one of several parts.
        """
        kind, parts = (
            self.metadata.get(key, default)
            for key, default in (("general.type", "model"), ("split.count", 1))
        )
        if kind != "model":
            raise ValueError(f"general.type must be 'model', got {kind!r}")
        if parts not in (0, 1):
            raise ValueError(
                f"the file is one of {parts} parts; join them with gguf-split --merge"
            )
        unread = [
            f"{key} = {self.metadata[key]!r}"
            for key in self.metadata
            if key.startswith(f"{self.name}.") and key not in self._read
        ]
        if unread:
            raise ValueError(
                f"metadata that the table of {self.name} does not account for: "
                + ", ".join(unread)
            )


def _value(field: Any) -> Any:
    from gguf import GGUFValueType

    value = field.contents()
    if field.types == [GGUFValueType.FLOAT32]:
        # The shortest decimal that rounds to this float32: 1e-05, not 9.99999974e-06.
        return float(str(np.float32(value)))
    return value


def architecture(source: GGUFFile) -> Arch:
    """Returns the table of the file's architecture and layout.

    Raises:
        ValueError: the architecture is not supported; the message lists those that are.
    """
    name = source.name
    if name == "llama" and source.get("expert_count", 0):
        name = "llama with experts"
    if name == "falcon" and "blk.0.attn_norm_2.weight" in source.tensors:
        name = "falcon with two norms"
    if name == "olmo2" and source.get("attention.sliding_window", 0):
        name = "olmo2 with windows"
    if name == "deepseek2":
        name = _deepseek2(source)
    if name not in ARCHITECTURES:
        names = [arch for arch in ARCHITECTURES if " " not in arch]
        raise ValueError(
            f"general.architecture must be one of {', '.join(names)}, got "
            f"{source.name!r}; load the folder that the file was made from"
        )
    return ARCHITECTURES[name]


def _deepseek2(source: GGUFFile) -> str:
    """Name of the DeepSeek table: V2 or V3 by the gate, and by an unsplit kv_b.

    Earlier files do not state the gate, and then it is V2's softmax.
    """
    gate = source.get("expert_gating_func", 1)
    if gate not in (1, 2):
        raise ValueError(
            f"expert_gating_func must be 1 (softmax) or 2 (sigmoid), got {gate!r}"
        )
    name = "deepseek2" if gate == 1 else "deepseek2 with sigmoid"
    is_unsplit = "blk.0.attn_kv_b.weight" in source.tensors
    return f"{name}, kv_b whole" if is_unsplit else name


def config_from_metadata(source: GGUFFile, arch: Arch) -> Values:
    """Builds the content of config.json from metadata and from which tensors exist.

    Raises:
        ValueError: metadata that are missing, vary by layer, contradict each other, or
            have a value that the config class cannot express.
    """
    heads = source.get("attention.head_count")
    defaults = {"attention.head_count_kv": heads, **arch.defaults}
    values = {key: source.get(key, defaults.get(key)) for key in arch.fields}
    # An architecture without experts in its table may still count them, as 0: any other
    # count is a fault, which the None here makes it.
    values |= {
        key: None
        for key in ("expert_count", "expert_used_count")
        if key not in arch.fields and source.get(key, 0)
    }
    faults = [
        f"{source.name}.{key} = {source.get(key)!r}"
        for key, value in values.items()
        if value is None or np.ndim(value)
    ]
    if faults:
        raise ValueError(
            f"metadata that a {arch.model_type} must have, once for all layers, or "
            "must not have: " + ", ".join(faults)
        )
    config: dict[str, Any] = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "vocab_size": _vocab_size(source),
        **{arch.fields[key]: value for key, value in values.items()},
        **arch.constants,
        **_presence(source, arch, values["block_count"]),
    }
    if arch.rope:
        config |= _rope(source, arch, values)
    own = arch.finish(source, config)
    expressed = {name: x for name, x in config.items() if name not in arch.omitted}
    return {**expressed, **own, **special_ids(source.metadata)}


def special_ids(metadata: Values) -> dict[str, int | None]:
    """Returns the ids of BOS, EOS and padding, None (no class default) if absent."""
    return {
        f"{field}_token_id": metadata.get(f"tokenizer.ggml.{name}_token_id")
        for field, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _vocab_size(source: GGUFFile) -> int:
    rows = int(source.tensors["token_embd.weight"].shape[-1])
    stated = source.get("vocab_size", rows)
    if stated != rows:
        raise ValueError(
            f"{source.name}.vocab_size is {stated}, but token_embd has {rows} rows"
        )
    return rows


def _presence(source: GGUFFile, arch: Arch, blocks: int) -> dict[str, bool]:
    """Boolean config fields that are true exactly if certain tensors exist."""
    flags: dict[str, bool] = {}
    for stem, row in arch.rows.items():
        for suffix, flag in ((".weight", row.weight), (".bias", row.bias)):
            if flag in (ALWAYS, NEVER):
                continue
            is_stored = any(
                name in source.tensors for name in names_at(stem + suffix, blocks)
            )
            key = flag.removeprefix("!")
            flags[key] = flags.get(key, False) or (is_stored != flag.startswith("!"))
    return flags


def _rope(source: GGUFFile, arch: Arch, values: Values) -> dict[str, Any]:
    even = values["embedding_length"] // values["attention.head_count"]
    dim = source.get("attention.key_length", even)
    value_dim = source.get("attention.value_length", dim)
    rotary = source.get("rope.dimension_count", dim)
    theta = source.get("rope.freq_base", arch.defaults.get("rope.freq_base", 10000.0))
    faults = []
    if value_dim != dim:
        faults.append(f"attention.value_length must be key_length {dim}: {value_dim}")
    if dim != even and not arch.head_dim:
        faults.append(f"attention.key_length must be embed / heads, {even}: {dim}")
    if rotary != dim and not arch.partial_rotary:
        faults.append(f"rope.dimension_count must be the head's {dim}: {rotary}")
    if faults:
        raise ValueError(f"{source.name}: " + "; ".join(faults))
    rope: dict[str, Any] = {
        "rope_theta": theta,
        "rope_scaling": rope_scaling(source, theta, dim),
    }
    if arch.head_dim:
        rope["head_dim"] = dim
    if arch.partial_rotary:
        share = rotary / dim
        # transformers truncates head_dim * share; rounding must not lose a dimension.
        rope["partial_rotary_factor"] = (
            share if int(dim * share) == rotary else math.nextafter(share, 1)
        )
    return rope


def floats(tensor: "ReaderTensor", data: np.ndarray) -> np.ndarray:
    """Dequantises `data`, all or some of the tensor's rows, to float32."""
    from gguf import quants

    try:
        return quants.dequantize(data, tensor.tensor_type)
    except NotImplementedError as unknown:
        raise ValueError(
            f"{tensor.name} is stored as {tensor.tensor_type.name}, which the gguf "
            "package cannot dequantise"
        ) from unknown


def exists(flag: str, config: Values) -> bool:
    """Whether a tensor exists, by a row's `weight` or `bias` flag and the config."""
    if flag in (ALWAYS, NEVER):
        return flag == ALWAYS
    return config[flag.removeprefix("!")] != flag.startswith("!")


def names_at(template: str, blocks: int) -> list[str]:
    """Returns the name in every block, or the one name of a tensor outside them."""
    if "{n}" not in template:
        return [template]
    return [at_block(template, n) for n in range(blocks)]


def at_block(template: str, block: int) -> str:
    """Returns the name with the block's number for `{n}`."""
    return template.replace("{n}", str(block))
