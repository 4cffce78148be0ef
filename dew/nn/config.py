"""Configurations of a transformer as frozen values, one of which is a model family.

>>> attention = Attention(heads=4, kv_heads=2, head_dim=8, windows=(0, 16))
>>> config = DecoderConfig(
...     vocab=97, embed=32, layers=2, attention=attention, mlp=MLP(dim=64)
... )
>>> config.attention.window(1), config.is_uniform
(16, False)
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from dew.nn.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Layer or RMS normalisation of the last axis."""

    kind: Literal["rms", "layer"] = "rms"
    """RMS normalisation, or layer normalisation, which subtracts the mean first."""
    eps: float = 1e-6
    """Added to the mean square before the square root."""
    offset: float = 0.0
    """Added to the stored weight before it multiplies (1 in Gemma)."""
    bias: bool = False
    """Whether a bias is added after the weight."""
    scaled: bool = True
    """Whether there is a weight."""
    float32_weight: bool = False
    """Whether the weight multiplies in float32, before rounding to the dtype of x."""


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """Normalisation of queries and keys before the rotary embedding."""

    norm: Norm
    shared_by: Literal["head", "each", "flat"] = "head"
    """Axes and weights: `head` normalises each head, with one weight for all of them;
    `each` normalises each head with a weight of its own; `flat` normalises all heads
    together, as one vector."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention: keys and values from one low-rank vector.

    DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """

    rank: int
    """Width of the vector from which keys and values of all heads are projected."""
    rope_dim: int
    """Dimensions of each head that are rotated; their keys are shared by all heads."""
    value_dim: int
    """Dimensions of a head's values."""
    query_rank: int | None = None
    """Width of the vector for queries; None projects them from x directly."""
    bias: bool = False
    """Whether the projections to the low-rank vectors have biases."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention, in which `heads` queries share `kv_heads` keys."""

    heads: int
    """Query heads, a multiple of `kv_heads`."""
    kv_heads: int
    """Key and value heads, each shared by heads / kv_heads query heads."""
    head_dim: int
    """Dimensions of a head's queries and keys."""
    rope: Rope | None = None
    """Rotary embedding; None for models without one."""
    local_rope: Rope | None = None
    """Rotary embedding of the layers with a window, where it differs from `rope`."""
    no_rope_layers: tuple[bool, ...] = ()
    """One flag per layer, true for layers without rotary embedding; empty for none."""
    windows: tuple[int, ...] = ()
    """Sliding window of each layer: the number of keys, its own included, to which a
    query attends backwards, and in an encoder forwards too. 0 is no window; empty is
    none in any layer."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases."""
    out_bias: bool = False
    """Whether the output projection has a bias."""
    qk_norm: QKNorm | None = None
    """Normalisation of queries and keys; None for models without one."""
    scale: float | None = None
    """Factor of the scores; None is head_dim ** -0.5."""
    scale_by_layer_number: bool = False
    """Whether scores are divided by the number of the layer, counted from 1 (GPT-2)."""
    softcap: float | None = None
    """Limit c of scores, as c · tanh(scores / c)."""
    alibi: bool = False
    """Whether scores have ALiBi's linear bias by distance (BLOOM, MPT)."""
    sinks: bool = False
    """Whether each head has a learned score that belongs to no key (gpt-oss)."""
    clip: float | None = None
    """Limit ± clip of queries, keys and values after their projections."""
    latent: Latent | None = None
    """Low-rank projections of multi-head latent attention; None projects directly."""
    dropout: float = 0.0
    """Dropout probability of attention weights in training."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"Attention.heads must be a multiple of kv_heads, got {self.heads} and "
                f"{self.kv_heads}"
            )

    def window(self, layer: int) -> int:
        """Returns the sliding window of a layer in keys, 0 for none."""
        return self.windows[layer] if self.windows else 0

    def scale_of(self, layer: int) -> float:
        """Returns the factor of a layer's scores."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scale *= self.rope.sharpness if self.rope else 1
        return scale / (layer + 1) if self.scale_by_layer_number else scale

    def rope_of(self, layer: int) -> Rope | None:
        """Returns the rotary embedding of a layer; None if it has none."""
        if self.no_rope_layers and self.no_rope_layers[layer]:
            return None
        return self.local_rope if self.is_local(layer) else self.rope

    def is_local(self, layer: int) -> bool:
        """Returns whether a layer uses `local_rope`."""
        return self.local_rope is not None and self.window(layer) > 0

    @property
    def value_dim(self) -> int:
        """Dimensions of the values of one head."""
        return self.latent.value_dim if self.latent else self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Feed-forward layer: down(act(gate x) · up x), or down(act(up x)) without gate."""

    dim: int
    """Width of the hidden layer."""
    activation: str = "silu"
    """Name in `dew.nn.activations.ACTIVATIONS`, as in config.json files."""
    bias: bool = False
    """Whether all projections have biases."""
    gated: bool = True
    """Whether there is a gate projection."""


@dataclass(frozen=True, kw_only=True)
class Clamp:
    """Clamped gate of experts: (up x + 1) · g · sigmoid(alpha · g) with g = gate x.

    up x is limited to ± `limit`, g from above alone (gpt-oss).
    """

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture of expert MLPs, of which the router selects `top_k` for each token."""

    experts: int
    """Number of experts."""
    top_k: int
    """Experts selected for each token."""
    dim: int
    """Width of each expert's hidden layer."""
    activation: str = "silu"
    """Name in `dew.nn.activations.ACTIVATIONS`, as in config.json files."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores."""
    normalize: bool = True
    """Whether the selected experts' scores are divided by their sum."""
    scale: float = 1.0
    """Factor of the experts' weights."""
    groups: int = 1
    """Equal groups of consecutive experts, of which `top_groups` are selected first."""
    top_groups: int = 1
    """Groups from which a token's experts are selected."""
    group_top_k: int = 2
    """Highest scores of a group whose sum is the group's own score."""
    balanced: bool = False
    """Whether a bias, not a parameter, is added to scores for the selection alone."""
    shared: MLP | None = None
    """MLP that is applied to every token besides the selected experts."""
    shared_gate: bool = False
    """Whether the shared MLP's output is multiplied by a learned sigmoid gate."""
    router_bias: bool = False
    """Whether the router's logits have a bias."""
    router_loss: float = 0.0
    """Coefficient of the router's load-balancing loss in training."""
    bias: bool = False
    """Whether the experts' projections have biases."""
    clamp: Clamp | None = None
    """Clamped gate in place of act(gate x) · up x."""

    def __post_init__(self) -> None:
        faults = []
        if not 1 <= self.top_k <= self.experts:
            faults.append(f"top_k must be in [1, {self.experts}], got {self.top_k}")
        if self.experts % self.groups:
            faults.append(f"groups must divide {self.experts}, got {self.groups}")
        if not 1 <= self.top_groups <= self.groups:
            faults.append(
                f"top_groups must be in [1, {self.groups}], got {self.top_groups}"
            )
        elif self.top_k * self.groups > self.experts * self.top_groups:
            faults.append(
                f"top_k must be at most the {self.top_groups} open groups' "
                f"{self.experts * self.top_groups // self.groups} experts, got "
                f"{self.top_k}"
            )
        if faults:
            raise ValueError("MoE: " + "; ".join(faults))


@dataclass(frozen=True, kw_only=True)
class Residual:
    """Arrangement of a block's norms and sums around the residual stream x."""

    norms: Literal["before", "after", "both", "sum"] = "before"
    """Place of the norms: before attention and MLP (pre-norm), after them, on both
    sides, or after the sum with x (post-norm)."""
    parallel: bool = False
    """Whether attention and MLP read the same x and are added to it together."""
    shared: bool = False
    """Whether one norm serves both parts of a parallel block."""
    scale: float = 1.0
    """Factor of the output of attention and of the MLP."""
    no_first_norm: bool = False
    """Whether the first block's attention reads x without a norm (ModernBERT)."""

    def __post_init__(self) -> None:
        if self.parallel and self.norms == "sum":
            raise ValueError(
                "Residual.parallel must be false where norms follow the sum, got true"
            )


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Input embeddings: token rows times `scale`, plus positions, then a norm."""

    scale: float = 1.0
    """Factor of the token embeddings."""
    positions: int = 0
    """Rows of the table of learned positions; 0 for models without one."""
    offset: int = 0
    """Rows before that of position 0 (OPT)."""
    positions_from_mask: bool = False
    """Whether a token's position is the number of earlier tokens that are not padding,
    and not its index."""
    norm: Norm | None = None
    """Norm after the sum; None for models without one."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Language-model head: logits are final states times a table, plus a bias."""

    tied: bool = False
    """Whether the table is the input embedding."""
    bias: bool = False
    """Whether logits have a bias."""
    scale: float = 1.0
    """Factor of the logits, before the cap."""
    softcap: float | None = None
    """Limit c of logits, as c · tanh(logits / c)."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Settings common to decoders and encoders: an embedding and a stack of blocks."""

    vocab: int
    """Vocabulary size."""
    embed: int
    """Width of the hidden states."""
    layers: int
    """Number of blocks."""
    attention: Attention
    mlp: MLP | MoE
    norm: Norm = Norm()
    """Norm of the blocks and of the final states."""
    residual: Residual = Residual()
    embedding: Embedding = Embedding()
    dense: MLP | None = None
    """MLP of the layers in `dense_layers`, in place of the mixture `mlp`."""
    dense_layers: tuple[int, ...] = ()
    init_std: float = 0.02
    """Standard deviation of initial weights."""

    def __post_init__(self) -> None:
        lists = {
            "attention.windows": self.attention.windows,
            "attention.no_rope_layers": self.attention.no_rope_layers,
        }
        faults = [
            f"{name} must have one entry for each of {self.layers} layers, got "
            f"{len(entries)}"
            for name, entries in lists.items()
            if entries and len(entries) != self.layers
        ]
        if faults:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(faults))

    def mlp_of(self, layer: int) -> MLP | MoE:
        """Returns the settings of a layer's feed-forward part."""
        return self.dense if self.dense and layer in self.dense_layers else self.mlp

    def stored_index(self, layer: int) -> int:
        """Returns the index under which a layer's weights are stored."""
        return layer

    def has_attn_norm(self, layer: int) -> bool:
        """Returns whether a layer has a norm before its attention."""
        return self.residual.norms in ("before", "both") and not (
            self.residual.no_first_norm and layer == 0
        )

    def kind_of(self, layer: int) -> tuple[Hashable, ...]:
        """Returns all settings that differ by layer, equal for layers built alike."""
        c = self.attention
        return (
            c.window(layer),
            c.scale_of(layer),
            c.rope_of(layer),
            self.mlp_of(layer),
            self.has_attn_norm(layer),
        )

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are built alike, each with weights of its own."""
        kinds = {self.kind_of(i) for i in range(self.layers)}
        stored = {self.stored_index(i) for i in range(self.layers)}
        return len(kinds) <= 1 and len(stored) == self.layers


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TransformerConfig):
    """Settings of a causal transformer, from token ids to logits."""

    head: Head | None = Head()
    """Language-model head; None for a trunk, which ends at its hidden states."""
    embedding_width: int | None = None
    """Width of the token tables where it is not `embed`: a linear map widens embeddings
    and another narrows final states (OPT-350m)."""
    extra_rows: int = 0
    """Rows of the token tables past the vocabulary, which let them be sharded evenly;
    they have no tokens and no logits."""

    @property
    def rows(self) -> int:
        """Rows of the token tables, extra rows included."""
        return self.vocab + self.extra_rows


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Dense layer of an encoder's head: act(W x + b), then optionally the norm."""

    activation: str | None = None
    """Name of the activation; None is that of the MLPs."""
    bias: bool = True
    normed: bool = False
    """Whether the model's norm follows."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Head of an encoder: pooling, a dense layer, then tokens' or labels' logits.

    Without `head` and `labels` there are no logits.
    """

    pool: Literal["first", "mean"] | None = None
    """One vector per text, the final state of the `first` position or the `mean` over
    those that are not padding; None keeps every position."""
    dense: Dense | None = None
    """Dense layer before the logits."""
    head: Head | None = None
    """Logits over the vocabulary; excludes `labels`."""
    labels: int | None = None
    """Number of logits per text or position, for classification; excludes `head`."""
    single: bool = False
    """Whether the last axis, of one logit, is dropped; needs `labels` = 1."""

    def __post_init__(self) -> None:
        faults = []
        if self.head and self.labels is not None:
            faults.append("head and labels exclude each other, got both")
        if self.single and self.labels != 1:
            faults.append(f"single needs labels=1, got {self.labels}")
        if faults:
            raise ValueError("HeadConfig: " + "; ".join(faults))

    @property
    def kind(self) -> Literal["vocab", "pooler", "text", "single", "token"]:
        """Kind of head: vocabulary, pooler, text, one number, or token labels."""
        if self.head:
            return "vocab"
        if self.pool:
            return "pooler" if self.labels is None else "text"
        return "single" if self.single else "token"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TransformerConfig):
    """Settings of a bidirectional transformer, from token ids to its `readout`."""

    readout: HeadConfig = HeadConfig()
    """Head over the final states."""
    types: int = 0
    """Rows of the token-type embedding; 0 for models without one."""
    embedding_width: int | None = None
    """Width of the token table where it is not `embed`; a linear map widens it."""
    padding: int | None = None
    """Token id that is not counted in positions; None counts all tokens."""
    shared: tuple[int, ...] = ()
    """Index of the stored block of each layer, where layers share weights (ALBERT);
    empty stores each layer's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared and len(self.shared) != self.layers:
            raise ValueError(
                f"EncoderConfig.shared must have one entry for each of {self.layers} "
                f"layers, got {len(self.shared)}"
            )

    def stored_index(self, layer: int) -> int:
        """Returns the index under which a layer's weights are stored."""
        return self.shared[layer] if self.shared else layer
