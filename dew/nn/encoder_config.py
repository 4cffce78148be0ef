"""What an encoder is made of beside what decoders have too, as values."""

from dataclasses import dataclass
from typing import Literal

from dew.nn.config import Head, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Dense:
    """act(W x + b), and then the model's norm where `normed`.

    The activation is that of the MLPs where None.
    """

    activation: str | None = None
    bias: bool = True
    normed: bool = False


@dataclass(frozen=True, kw_only=True)
class Readout:
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
            raise ValueError("Readout: " + "; ".join(faults))

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
    embedding is `width` wide and a linear map widens it, unless None. Positions do not
    count tokens `padding`. Entry i of `shared` is the number of the stored block that
    stands in place i; without entries each block has its own weights.
    """

    readout: Readout = Readout()
    types: int = 0
    width: int | None = None
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
