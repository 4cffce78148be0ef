"""A row of the families' tests: a tiny random config of one family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM

VOCAB = 97
WIDTH = 32

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # torch gives the row of the padding token no gradient; no test reads it.
    "pad_token_id": VOCAB - 1,
}


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns the fields except `names`, which a config class does not have."""
    return {name: value for name, value in fields.items() if name not in names}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One family: its config class, a tiny config, and changes worth a run each.

    `positions` names the field with the number of learned positions, of which
    `first_position` come before that of the first token. `model` builds the model of a
    config.
    """

    config: Any
    fields: Mapping[str, Any]
    variants: tuple[Mapping[str, Any], ...] = ()
    positions: str | None = None
    first_position: int = 0
    model: Callable[[Any], Any] = AutoModelForCausalLM.from_config

    def with_positions(self, seq: int) -> Mapping[str, Any]:
        """Changes that make learned positions long enough for `seq` tokens."""
        return (
            {}
            if self.positions is None
            else {self.positions: self.first_position + seq}
        )
