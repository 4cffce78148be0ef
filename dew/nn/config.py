"""What a transformer is made of, as values. A family of models is one such value."""

from dataclasses import dataclass
from typing import Any, Literal

from dew.nn.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalisation: `rms`, or `layer` which takes the mean away first.

    The weight is `offset` plus what is stored, absent without `scaled`; it multiplies
    in float32 where `float32_weight`, after rounding to the dtype of x otherwise.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    bias: bool = False
    scaled: bool = True
    float32_weight: bool = False


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """Norms of queries and keys before they are turned.

    `shared_by` says what one norm covers: `head`, a head, with the same weights for
    all; `each`, a head, each with its own; `flat`, all heads laid end to end.
    """

    norm: Norm
    shared_by: Literal["head", "each", "flat"] = "head"


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Keys and values of all heads come from one vector of `rank` numbers.

    Queries come from one of `query_rank`, or straight from x where None. `rope_dim` of
    a head's dimensions turn, and their keys are the same in all heads; values have
    `value_dim` dimensions.
    """

    rank: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention: `heads` queries share `kv_heads` keys and values.

    Scores are multiplied by `scale`, or by head_dim ** -0.5 where None, divided by the
    layer's number, from 1, where `scale_by_layer_number`, and limited to ± `softcap`.
    Each entry of `windows` is the number of keys, its own included, that a query of
    that layer attends to backwards, and forwards in an encoder; 0 is all. Layers with a
    window use the rotary embedding `local_rope` where it is not None. Layers flagged in
    `no_rope_layers` have no rotary embedding, nor has any where `rope` is None. `alibi`
    biases scores by distance instead. `sinks` give each head a score that belongs to no
    key.
    Queries, keys and values are clipped to ± `clip`, and come through `latent` where
    there is one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = None
    local_rope: Rope | None = None
    no_rope_layers: tuple[bool, ...] = ()
    windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    scale: float | None = None
    scale_by_layer_number: bool = False
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    clip: float | None = None
    latent: Latent | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"Attention.heads must be a multiple of kv_heads, got {self.heads} and "
                f"{self.kv_heads}"
            )

    def window(self, layer: int) -> int:
        """How many keys a query of this layer sees, 0 for all."""
        return self.windows[layer] if self.windows else 0

    def scale_of(self, layer: int) -> float:
        """What scores of this layer are multiplied by."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scale *= self.rope.sharpness if self.rope else 1
        return scale / (layer + 1) if self.scale_by_layer_number else scale

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary embedding of this layer."""
        if self.no_rope_layers and self.no_rope_layers[layer]:
            return None
        return self.local_rope if self.is_local(layer) else self.rope

    def is_local(self, layer: int) -> bool:
        """Whether this layer turns by `local_rope`."""
        return self.local_rope is not None and self.window(layer) > 0

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim


@dataclass(frozen=True, kw_only=True)
class MLP:
    """down(act(gate x) · up x), or down(act(up x)) unless `gated`; `dim` wide.

    All of them have biases or none.
    """

    dim: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True, kw_only=True)
class Clamp:
    """(up x + 1) · g · sigmoid(`alpha` g) for g = gate x, both within ± `limit`.

    The gate has no lower limit.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A mixture of `experts` MLPs, of which each token reads the `top_k` best.

    Scores are the router's softmax or sigmoid, divided by the sum of the chosen ones
    where `normalize`, and times `scale`. With `groups`, experts stand in that many
    equal groups, and only the `top_groups` whose `group_top_k` sum highest are open.
    With `balanced`, a bias beside the parameters joins the scores for the choice alone.
    `shared` is an MLP that every token reads as well, times the sigmoid of a score of
    its own where `shared_gate`. `clamp` changes what the gate does.
    """

    experts: int
    top_k: int
    dim: int
    activation: str = "silu"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_top_k: int = 2
    balanced: bool = False
    shared: MLP | None = None
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    clamp: Clamp | None = None

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
    """How a block joins the residual stream x.

    `norms` stand before attention and MLP, after them, on both sides, or after the sum
    with x. A `parallel` block reads one x for both parts, through one norm where
    `shared`. The output of each part is multiplied by `scale`. Where `no_first_norm`,
    the first block's attention reads x without a norm.
    """

    norms: Literal["before", "after", "both", "sum"] = "before"
    parallel: bool = False
    shared: bool = False
    scale: float = 1.0
    no_first_norm: bool = False

    def __post_init__(self) -> None:
        if self.parallel and self.norms == "sum":
            raise ValueError(
                "Residual.parallel must be false where norms follow the sum, got true"
            )


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Rows of the table times `scale`, plus learned positions, then a norm.

    Position p reads row p + `offset` of the `positions` rows; 0 rows is no positions.
    Where `positions_from_mask`, a position is the number of earlier tokens that are not
    padding.
    """

    scale: float = 1.0
    positions: int = 0
    offset: int = 0
    positions_from_mask: bool = False
    norm: Norm | None = None


@dataclass(frozen=True, kw_only=True)
class Head:
    """Logits: products with the table, plus a bias, times `scale`, within ± softcap.

    `tied` uses the embedding as the table.
    """

    tied: bool = False
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What decoders and encoders have in common: an embedding and a stack of blocks.

    The layers named in `dense` have that MLP instead of the mixture `mlp`.
    `init_std` is the scale of weights drawn from a key.
    """

    vocab: int
    embed: int
    layers: int
    attention: Attention
    mlp: MLP | MoE
    norm: Norm = Norm()
    residual: Residual = Residual()
    embedding: Embedding = Embedding()
    dense: MLP | None = None
    dense_layers: tuple[int, ...] = ()
    init_std: float = 0.02

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
        """The feed-forward part of this layer."""
        return self.dense if self.dense and layer in self.dense_layers else self.mlp

    def stored(self, layer: int) -> int:
        """The number under which this layer's weights are stored."""
        return layer

    def has_attn_norm(self, layer: int) -> bool:
        """Whether a norm stands before this layer's attention."""
        return self.residual.norms in ("before", "both") and not (
            self.residual.no_first_norm and layer == 0
        )

    def kind_of(self, layer: int) -> tuple[Any, ...]:
        """How this layer is built, as a value that layers built alike share."""
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
        """Whether every layer is built like the first, with weights of its own."""
        kinds = {self.kind_of(i) for i in range(self.layers)}
        stored = {self.stored(i) for i in range(self.layers)}
        return len(kinds) <= 1 and len(stored) == self.layers


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TransformerConfig):
    """A causal transformer, from token ids to logits.

    Token tables have width `embedding_width` where it is not None: a linear map widens
    their rows, and another narrows the final states. They have `extra_rows` rows after
    those of the vocabulary, to be split evenly: no tokens, so no logits.
    """

    head: Head = Head()
    embedding_width: int | None = None
    extra_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows of a table of tokens, spare ones included."""
        return self.vocab + self.extra_rows


@dataclass(frozen=True, kw_only=True)
class Dense:
    """act(W x + b), and then the model's norm where `normed`.

    The activation is that of the MLPs where None.
    """

    activation: str | None = None
    bias: bool = True
    normed: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What is read off an encoder's final states.

    Of every position, or with `pool` of one vector for the text: its `first` position
    or the `mean` of those that are no padding. It goes through `dense`, and from there
    to the vocabulary by `head`, or to as many scores as `labels`; `single` drops the
    axis of one score. Without either there are no logits.
    """

    pool: Literal["first", "mean"] | None = None
    dense: Dense | None = None
    head: Head | None = None
    labels: int | None = None
    single: bool = False

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
        """What it is for."""
        if self.head:
            return "vocab"
        if self.pool:
            return "pooler" if self.labels is None else "text"
        return "single" if self.single else "token"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TransformerConfig):
    """A transformer in which every token sees all others, from token ids to `readout`.

    Tokens are of `types` kinds, each with a row that is added; 0 rows is no kinds. The
    embedding is `embedding_width` wide and a linear map widens it, unless None.
    Positions do not count tokens `padding`. Entry i of `shared` is the number of the
    stored block that stands in place i; without entries each block has its own weights.
    """

    readout: HeadConfig = HeadConfig()
    types: int = 0
    embedding_width: int | None = None
    padding: int | None = None
    shared: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared and len(self.shared) != self.layers:
            raise ValueError(
                f"EncoderConfig.shared must have one entry for each of {self.layers} "
                f"layers, got {len(self.shared)}"
            )

    def stored(self, layer: int) -> int:
        """The number under which this layer's weights are stored."""
        return self.shared[layer] if self.shared else layer
