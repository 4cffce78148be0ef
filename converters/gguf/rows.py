"""What the tables of GGUF architectures are made of: records, layouts, shared rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from einops import rearrange


class HeadCounts(NamedTuple):
    """What a layout needs to know: the attention's head counts."""

    heads: int
    kv_heads: int


@runtime_checkable
class Facts(Protocol):
    """The metadata below the architecture's name; whatever is read counts as used."""

    name: str

    def get(self, key: str, default: Any = None) -> Any:
        """Returns one value, or the default where the file has none."""
        ...

    def values(self, name: str) -> np.ndarray | None:
        """Returns a tensor that holds settings rather than weights, or None."""
        ...


Layout = Callable[[np.ndarray, HeadCounts], np.ndarray]
"""Turns a tensor as GGUF lays it out into the one transformers stores."""

ALWAYS, NEVER = "always", "never"


@dataclass(frozen=True, kw_only=True)
class Fuse:
    """How rows that go to one tensor share its `axis`, in the order of the table.

    They lie end to end, or `alternate` entry by entry. `merge` then makes one axis of
    the first two.
    """

    axis: int
    alternate: bool = False
    merge: bool = False

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the shape of the whole."""
        whole = list(shapes[0])
        whole[self.axis] = sum(shape[self.axis] for shape in shapes)
        return (whole[0] * whole[1], *whole[2:]) if self.merge else tuple(whole)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the whole."""
        shape = self.shape([part.shape for part in parts])
        if not self.alternate:
            return np.concatenate(parts, axis=self.axis).reshape(shape)
        last = [np.moveaxis(part, self.axis, -1) for part in parts]
        mixed = np.stack(last, axis=-1).reshape(*last[0].shape[:-1], -1)
        return np.moveaxis(mixed, -1, self.axis).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """Where a GGUF tensor goes: `{n}` is the block, `{e}` an index of the first axis.

    `weight` and `bias` say when the tensor is there: `ALWAYS`, `NEVER`, or a boolean
    config field that is true exactly then (`!field`: false exactly then). `suffixes`
    are what transformers calls the two; `fuse` is for rows that share one tensor.
    `at` says of a block's number, given the config, whether that block has the row.
    """

    to: str
    layout: Layout = lambda tensor, heads: tensor
    weight: str = ALWAYS
    bias: str = NEVER
    suffixes: tuple[str, str] = (".weight", ".bias")
    fuse: Fuse | None = None
    at: Callable[[int, Mapping[str, Any]], bool] = lambda block, config: True


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One architecture: its tensors, its metadata, and what both imply.

    `fields` are metadata keys with the config field each becomes; `defaults` stand in
    for absent ones. `head_dim` and `partial_rotary` say that the config can hold these
    apart from the other sizes. `finish` reads what a table cannot say, and `absent`
    are fields that this class spells otherwise.
    """

    model_type: str
    class_name: str
    rows: Mapping[str, TensorRow]
    fields: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    rope: bool = True
    head_dim: bool = False
    partial_rotary: bool = False
    absent: tuple[str, ...] = ()
    finish: Callable[[Facts, Mapping[str, Any]], Mapping[str, Any]] = (
        lambda facts, config: {}
    )


def rotary_halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Puts a head's rows back into two halves, which llama.cpp interleaves in pairs."""
    return rearrange(
        tensor, "(heads dim two) ... -> (heads two dim) ...", heads=heads, two=2
    )


def q_halves(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Puts the rows of every query head back into halves."""
    return rotary_halves(tensor, heads.heads)


def k_halves(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Puts the rows of every key head back into halves."""
    return rotary_halves(tensor, heads.kv_heads)


def grouped(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
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


def transposed(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Swaps a matrix to GPT-2's input-first order; a bias stays as it is."""
    return tensor.T if tensor.ndim == 2 else tensor


def minus_one(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Takes off the one that GGUF adds to the weight of a norm."""
    # The subtraction must not promote: shapes are planned on integer stand-ins.
    return (tensor - 1).astype(tensor.dtype)


def one_row(tensor: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Gives a vector the leading axis of a matrix with one row."""
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
    """Returns the rows, each with the changes."""
    return {stem: replace(row, **changes) for stem, row in rows.items()}


def less_one(rows: Mapping[str, TensorRow]) -> dict[str, TensorRow]:
    """Gemma's norms multiply by 1 + weight, and GGUF stores the sum."""
    return {
        stem: replace(row, layout=minus_one) if stem.endswith("norm") else row
        for stem, row in rows.items()
    }


def interleaved(rows: Mapping[str, TensorRow]) -> dict[str, TensorRow]:
    """Returns the rows with the q and k layouts that llama.cpp's own rotary needs."""
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
