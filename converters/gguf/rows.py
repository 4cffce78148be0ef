"""Records, layouts and shared rows of the tables of GGUF architectures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from einops import rearrange

from dew.converters.config.fields import Values


class HeadCounts(NamedTuple):
    """Numbers of query heads and of key and value heads, which layouts use."""

    heads: int
    kv_heads: int


@runtime_checkable
class Facts(Protocol):
    """Metadata below the architecture's name; a key that is read counts as used."""

    name: str

    def get(self, key: str, default: Any = None) -> Any:
        """Returns one value, or the default if the file has none."""
        ...

    def values(self, name: str) -> np.ndarray | None:
        """Returns a tensor that holds settings, not weights; None if absent."""
        ...


Layout = Callable[[np.ndarray, HeadCounts], np.ndarray]
"""Function from a tensor in GGUF's layout to the one that transformers stores."""

ALWAYS, NEVER = "always", "never"


@dataclass(frozen=True, kw_only=True)
class Fuse:
    """Joining of several rows along one `axis` of one tensor, in the table's order.

    Rows are laid end to end, or entry by entry if `alternate`. `merge` then makes one
    axis of the first two.
    """

    axis: int
    alternate: bool = False
    merge: bool = False

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the shape of the joined tensor."""
        joined = list(shapes[0])
        joined[self.axis] = sum(shape[self.axis] for shape in shapes)
        return (joined[0] * joined[1], *joined[2:]) if self.merge else tuple(joined)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor that the parts make together."""
        shape = self.shape([part.shape for part in parts])
        if not self.alternate:
            return np.concatenate(parts, axis=self.axis).reshape(shape)
        last = [np.moveaxis(part, self.axis, -1) for part in parts]
        mixed = np.stack(last, axis=-1).reshape(*last[0].shape[:-1], -1)
        return np.moveaxis(mixed, -1, self.axis).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """Place and layout of a GGUF tensor in the transformers checkpoint.

    Attributes:
        to: name there; `{n}` is the block, `{e}` an index of the first axis.
        layout: function from GGUF's layout to that of transformers.
        weight: when the weight exists: `ALWAYS`, `NEVER`, or a boolean config field
            that is true exactly then (`!field`: false exactly then).
        bias: when the bias exists, likewise.
        suffixes: names of weight and bias in transformers.
        fuse: how rows with the same `to` share one tensor.
        in_block: whether a block has the row, from its number and the config.
    """

    to: str
    layout: Layout = lambda tensor, heads: tensor
    weight: str = ALWAYS
    bias: str = NEVER
    suffixes: tuple[str, str] = (".weight", ".bias")
    fuse: Fuse | None = None
    in_block: Callable[[int, Values], bool] = lambda block, config: True


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture: its tensors, its metadata, and the config of both.

    Attributes:
        model_type: `model_type` in config.json.
        class_name: class in transformers.
        rows: place of each tensor, by its name in GGUF without suffix.
        fields: metadata keys, with the config field that each becomes.
        defaults: values of metadata keys that a file lacks.
        constants: config fields that no metadata state.
        rope: whether the model has a rotary embedding that is read as usual.
        head_dim: whether the config has a width of heads apart from other sizes.
        partial_rotary: whether the config has a rotated part of a head.
        omitted: config fields that this class spells otherwise.
        finish: reads further metadata into config fields, and checks them.
    """

    model_type: str
    class_name: str
    rows: Mapping[str, TensorRow]
    fields: Mapping[str, str]
    defaults: Values = field(default_factory=dict)
    constants: Values = field(default_factory=dict)
    rope: bool = True
    head_dim: bool = False
    partial_rotary: bool = False
    omitted: tuple[str, ...] = ()
    finish: Callable[[Facts, Values], Values] = lambda facts, config: {}


def rotary_halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorders a head's rows from llama.cpp's adjacent pairs to two halves."""
    return rearrange(
        tensor, "(heads dim two) ... -> (heads two dim) ...", heads=heads, two=2
    )


def q_halves(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Reorders the rows of every query head from pairs to halves."""
    return rotary_halves(tensor, heads.heads)


def k_halves(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Reorders the rows of every key head from pairs to halves."""
    return rotary_halves(tensor, heads.kv_heads)


def group_by_kv(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Regroups all q, all k, all v rows as (its q heads, k, v) for each kv head."""
    q, kv = heads
    group = q // kv
    order = [
        head
        for g in range(kv)
        for head in (*range(g * group, (g + 1) * group), q + g, q + kv + g)
    ]
    parts = rearrange(tensor, "(head dim) ... -> head dim ...", head=q + 2 * kv)
    return rearrange(parts[order], "head dim ... -> (head dim) ...")


def transpose_matrix(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Transposes a matrix to GPT-2's input-first order; a bias stays as it is."""
    return tensor.T if tensor.ndim == 2 else tensor


def subtract_one(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Subtracts the 1 that GGUF adds to the weight of a norm."""
    # The dtype must stay: shapes are planned on one broadcast byte.
    return (tensor - 1).astype(tensor.dtype)


def one_row(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Reshapes a vector to a matrix with one row."""
    return tensor.reshape(1, -1)


BLOCK = "model.layers.{n}."

ENDS = {
    "token_embd": TensorRow(to="model.embed_tokens"),
    "output_norm": TensorRow(to="model.norm"),
    "output": TensorRow(to="lm_head", weight="!tie_word_embeddings"),
}
ATTENTION = {
    "blk.{n}.attn_q": TensorRow(to=BLOCK + "self_attn.q_proj"),
    "blk.{n}.attn_k": TensorRow(to=BLOCK + "self_attn.k_proj"),
    "blk.{n}.attn_v": TensorRow(to=BLOCK + "self_attn.v_proj"),
    "blk.{n}.attn_output": TensorRow(to=BLOCK + "self_attn.o_proj"),
}
NORMS = {
    "blk.{n}.attn_norm": TensorRow(to=BLOCK + "input_layernorm"),
    "blk.{n}.ffn_norm": TensorRow(to=BLOCK + "post_attention_layernorm"),
}
QK_NORMS = {
    "blk.{n}.attn_q_norm": TensorRow(to=BLOCK + "self_attn.q_norm"),
    "blk.{n}.attn_k_norm": TensorRow(to=BLOCK + "self_attn.k_norm"),
}
MLP = {
    "blk.{n}.ffn_gate": TensorRow(to=BLOCK + "mlp.gate_proj"),
    "blk.{n}.ffn_up": TensorRow(to=BLOCK + "mlp.up_proj"),
    "blk.{n}.ffn_down": TensorRow(to=BLOCK + "mlp.down_proj"),
}
EXPERTS = {
    "blk.{n}.ffn_gate_inp": TensorRow(to=BLOCK + "mlp.gate"),
    "blk.{n}.ffn_gate_exps": TensorRow(to=BLOCK + "mlp.experts.{e}.gate_proj"),
    "blk.{n}.ffn_up_exps": TensorRow(to=BLOCK + "mlp.experts.{e}.up_proj"),
    "blk.{n}.ffn_down_exps": TensorRow(to=BLOCK + "mlp.experts.{e}.down_proj"),
}
SANDWICH = {
    "blk.{n}.attn_norm": TensorRow(to=BLOCK + "input_layernorm"),
    "blk.{n}.post_attention_norm": TensorRow(to=BLOCK + "post_attention_layernorm"),
    "blk.{n}.ffn_norm": TensorRow(to=BLOCK + "pre_feedforward_layernorm"),
    "blk.{n}.post_ffw_norm": TensorRow(to=BLOCK + "post_feedforward_layernorm"),
}
PLAIN = {**ENDS, **ATTENTION, **NORMS, **MLP}


def with_all(rows: Mapping[str, TensorRow], **changes: Any) -> dict[str, TensorRow]:
    """Returns the rows, each with the changed attributes."""
    return {stem: replace(row, **changes) for stem, row in rows.items()}


def with_norms_less_one(rows: Mapping[str, TensorRow]) -> dict[str, TensorRow]:
    """Returns the rows for norms that multiply by 1 + weight, a sum GGUF stores."""
    return {
        stem: replace(row, layout=subtract_one) if stem.endswith("norm") else row
        for stem, row in rows.items()
    }


def with_interleaved_rope(rows: Mapping[str, TensorRow]) -> dict[str, TensorRow]:
    """Returns the rows for q and k in pairs, as llama.cpp's own RoPE needs them."""
    layouts = {"blk.{n}.attn_q": q_halves, "blk.{n}.attn_k": k_halves}
    return {
        stem: replace(row, layout=layouts.get(stem, row.layout))
        for stem, row in rows.items()
    }


SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
SILU = {"hidden_act": "silu"}
NO_BIAS = {"attention_bias": False, **SILU}
