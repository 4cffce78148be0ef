"""What a decoder is made of, as values. A family of models is one such value."""

from dataclasses import dataclass
from typing import Literal

from dew.nn.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention: `heads` queries share `kv_heads` keys and values.

    Scores are multiplied by `scale`, or by head_dim ** -0.5 where None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"Attention.heads must be a multiple of kv_heads, got {self.heads} and "
                f"{self.kv_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class MLP:
    """down(act(gate x) · up x): `dim` wide, biases on all three or on none."""

    dim: int
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A mixture of `experts` MLPs, of which each token reads the `top_k` best.

    Scores are the router's softmax or sigmoid, divided by the sum of the chosen ones
    where `normalize`, and times `scale`. With `groups`, experts stand in that many
    equal groups, and only the `top_groups` whose best two sum highest are open. With
    `balanced`, a bias beside the parameters joins the scores for the choice alone.
    `shared` is an MLP that every token reads as well.
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
    balanced: bool = False
    shared: MLP | None = None

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
        if faults:
            raise ValueError("MoE: " + "; ".join(faults))


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A causal transformer, from token ids to logits.

    `tied` uses the embedding as the output matrix. `init_std` is the scale of weights
    drawn from a key.
    """

    vocab: int
    embed: int
    layers: int
    attention: Attention
    mlp: MLP | MoE
    norm_eps: float = 1e-6
    tied: bool = False
    init_std: float = 0.02
