"""What a row of the families' tests is: a tiny random config of one family."""

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
    # torch lets no gradient reach the row of padding; no test reads it.
    "pad_token_id": VOCAB - 1,
}


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The fields but those that a config class does not have."""
    return {name: value for name, value in fields.items() if name not in names}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One family: its config class, a tiny config, and changes worth a run each.

    `learned` names the field that says where learned positions end, of which `before`
    stand before the first token's. `model` makes the model of a config.
    """

    config: Any
    fields: Mapping[str, Any]
    variants: tuple[Mapping[str, Any], ...] = ()
    learned: str | None = None
    before: int = 0
    model: Callable[[Any], Any] = AutoModelForCausalLM.from_config

    def room(self, seq: int) -> Mapping[str, Any]:
        """What makes learned positions long enough."""
        return {} if self.learned is None else {self.learned: self.before + seq}
