"""What a decoder is made of, as values. A family of models is one such value."""

from dataclasses import dataclass

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
class DecoderConfig:
    """A causal transformer, from token ids to logits.

    `tied` uses the embedding as the output matrix. `init_std` is the scale of weights
    drawn from a key.
    """

    vocab: int
    embed: int
    layers: int
    attention: Attention
    mlp: MLP
    norm_eps: float = 1e-6
    tied: bool = False
    init_std: float = 0.02
