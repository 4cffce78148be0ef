"""Every field of a config is followed, has no effect, or is refused."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

import dew
from dew.converters.families import FAMILIES
from tests.converters.families.case import Tiny
from tests.converters.families.decoders import TINY, without
from tests.support import hf_models as hf
from tests.support.conditioning import condition, on_a_fair_text
from tests.support.tolerances import LOGITS

OTHERS: Mapping[str, Any] = {
    "architectures": ["SomethingElse"],
    "hidden_act": "gelu",
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
}
"""Other values of fields whose type does not suggest one."""

# dtype is how tensors are stored: test_converters_files covers it. Names and versions
# are what from_pretrained finds the classes by.
STORAGE = {"dtype", "model_type", "transformers_version", "_name_or_path"}

# Orders one product otherwise: torch's logits move by rounding, and by no more.
ROUNDED = {"reorder_and_upcast_attn"}


def other(name: str, value: Any) -> Any:
    """Another value for a field, of the same kind."""
    if name in OTHERS:
        return OTHERS[name]
    kinds: Mapping[type, Any] = {
        bool: lambda: not value,
        int: lambda: value * 2 or 3,
        float: lambda: value * 1.5 or 0.25,
        dict: lambda: {"0": "a", "1": "b", "2": "c"},
        str: lambda: value + "x",
    }
    return kinds.get(type(value), lambda: 3)()


REFUSALS = (
    AssertionError,
    AttributeError,
    KeyError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    UnboundLocalError,
    ValueError,
    ZeroDivisionError,
)


def torch_says(
    tiny: Tiny, config: Mapping[str, Any], ids: np.ndarray, like: Any = None
) -> tuple[Any, np.ndarray] | None:
    """The model of a config and its logits; None where torch cannot run it either.

    It has the weights of the model `like` where their shapes are the same.
    """
    try:
        # One kernel for all: output_attentions alone would choose another.
        built = tiny.config(**config, attn_implementation="eager")
        model = hf.build(built, make=tiny.model)
        shapes = {name: t.shape for name, t in model.state_dict().items()}
        if like is not None and shapes == {
            name: t.shape for name, t in like.state_dict().items()
        }:
            model.load_state_dict(like.state_dict())
        return model, hf.torch_logits(model, ids)
    except REFUSALS:
        return None


def text(seed: int) -> np.ndarray:
    return hf.tokens(seq=24, seed=seed) % 48


SAMPLE = set(random.Random(0).sample(sorted(TINY), 2))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full)
        for name in sorted(TINY)
    ],
)
def test_every_field_is_followed_or_refused(family: str, tmp_path: Path) -> None:
    tiny = TINY[family]
    kind, fields = tiny.config, tiny.fields
    ids = text(0)
    base = FAMILIES[family].read(kind(**fields).to_dict())
    like, unchanged = torch_says(tiny, fields, ids) or (None, np.zeros(0))
    wrong = []
    for name, value in kind(**fields).to_dict().items():
        if name in STORAGE:
            continue
        changes = {name: other(name, value)}
        said = torch_says(tiny, {**fields, **changes}, ids, like)
        if said is None:
            continue
        verdict = ours(family, base, unchanged, said, tmp_path / name)
        wrong += [] if verdict is None else [f"{changes}: {verdict}"]
    assert not wrong


def ours(
    family: str,
    base: Any,
    unchanged: np.ndarray,
    said: tuple[Any, np.ndarray],
    folder: Path,
) -> str | None:
    """What is wrong with our reading of a config; JAX runs only if it reads anew."""
    model, want = said
    try:
        parsed = FAMILIES[family].read(model.config.to_dict())
    except ValueError:
        return None
    if parsed == base:
        is_same = want.shape == unchanged.shape and np.array_equal(want, unchanged)
        if folder.name in ROUNDED:
            is_same = hf.largest_difference(want, unchanged) < LOGITS
        return None if is_same else "counts as inert, and torch's logits moved"
    model.save_pretrained(folder)
    difference = logits_apart(dew.load(folder), model)
    return None if difference < LOGITS else f"differs by {difference}"


def logits_apart(source: Any, model: Any) -> float:
    """The largest difference of the logits of a fair text."""

    def difference(seed: int) -> float:
        got = hf.logits_op_by_op(source, text(seed))
        return hf.largest_difference(got, hf.torch_logits(model, text(seed)))

    def conditioned(seed: int) -> float:
        return condition(model, lambda m: [hf.torch_logits(m, text(seed))])

    return on_a_fair_text(LOGITS, difference, conditioned)


def test_all_wrong_fields_are_named_at_once() -> None:
    config = {
        **hf.LLAMA,
        "hidden_act": "mish",
        "vocab_size": "many",
        "rms_norm_eps": None,
    }
    with pytest.raises(ValueError, match="is not reproduced") as error:
        FAMILIES["llama"].read(config)
    for fault in (
        "hidden_act must be one of 'silu'",
        "vocab_size must be a int, got 'many'",
        "rms_norm_eps must be a float, got None",
    ):
        assert fault in str(error.value)


def test_absent_fields_take_the_defaults_of_transformers() -> None:
    theirs = LlamaConfig()
    ours = FAMILIES["llama"].read({})
    assert (ours.vocab, ours.embed, ours.layers) == (32000, 4096, 32)
    assert ours.attention.kv_heads == theirs.num_key_value_heads
    assert ours.attention.head_dim == theirs.head_dim
    assert ours == FAMILIES["llama"].read(theirs.to_dict())


def test_absent_layer_types_are_those_of_transformers() -> None:
    read = set()
    for family, tiny in TINY.items():
        given = {**without(tiny.fields, "layer_types"), "num_hidden_layers": 6}
        if "use_sliding_window" in tiny.config().to_dict():
            given |= {"use_sliding_window": True, "sliding_window": 8}
        stated = tiny.config(**given).to_dict()
        if "layer_types" in stated:
            silent = FAMILIES[family].read(without(stated, "layer_types"))
            assert silent == FAMILIES[family].read(stated), family
            read.add(family)
    assert {"qwen2", "qwen2_moe", "gemma3_text", "smollm3"} <= read
