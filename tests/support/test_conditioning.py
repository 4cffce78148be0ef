"""What excuses a text is the reference's own doing, and never ours."""

import pytest
import torch

from tests.converters.families.measure import logits_of, model_of
from tests.support import hf_models as hf
from tests.support.conditioning import FAIR, TEXTS, condition, on_a_fair_text

NEVER = float("inf")


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("mixtral", True)])
def test_experts_of_one_score_make_a_text_unfair(family: str, tied: bool) -> None:
    model = model_of(family, {})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(parameter[:1].expand_as(parameter))
    says = logits_of(hf.tokens(2, 12), None)
    assert (condition(model, says) > FAIR) is tied


def test_a_difference_on_a_fair_text_stands() -> None:
    texts = {0: (0.5, 1e3), 1: (0.25, 1.0), 2: (0.0, 1.0)}
    found = on_a_fair_text(0.1, lambda s: texts[s][0], lambda s: texts[s][1])
    assert found == 0.25


def test_no_fair_text_is_no_success() -> None:
    asked: list[int] = []

    def differs(seed: int) -> float:
        asked.append(seed)
        return 0.5

    assert on_a_fair_text(0.1, differs, lambda _: 1e3) == NEVER
    assert asked == list(range(TEXTS))


def test_a_text_within_the_bar_needs_no_condition() -> None:
    def never(seed: int) -> float:
        raise AssertionError(seed)

    assert on_a_fair_text(0.1, lambda _: 0.05, never) == 0.05
