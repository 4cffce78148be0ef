"""Every model of the zoo in torch and in JAX: outputs, gradients, and the split.

A run of all of them writes docs/results/zoo.md.
"""

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dew.bridges import Lowered, LoweringError, lower
from dew.bridges.lowering.parity import check_parity, torch_outputs
from dew.bridges.names import flat_weights
from tests.bridges.lowering import zoo
from tests.bridges.lowering.zoo import ZOO
from tests.support.tolerances import ZOO_GRADIENT, ZOO_OUTPUT

# A few rows in each run, without those whose graphs take a minute; all under `full`.
SAMPLE = set(random.Random(5).sample(sorted(set(ZOO) - {"gemma3n", "qwen3_next"}), 3))
PAGE = Path(__file__).parents[3] / "docs" / "results" / "zoo.md"


def gradient_gap(lowered: Lowered, model: Any, entry: zoo.Entry) -> float:
    """The largest difference of a weight's gradient, as a part of the largest one."""
    inputs = entry.inputs()

    def loss(params: Any) -> jax.Array:
        variables = {**lowered.variables, "params": params}
        return jnp.mean(lowered.outputs(variables, inputs)[entry.loss_from] ** 2)

    ours = flat_weights({"params": jax.grad(loss)(lowered.variables["params"])})
    where = lowered.programs.points
    torch_outputs(model, lowered.example, where)[
        entry.loss_from
    ].square().mean().backward()
    theirs = {
        name: torch.zeros_like(w).numpy() if w.grad is None else w.grad.numpy()
        for name, w in model.named_parameters()
        if w.requires_grad
    }
    assert set(ours) == set(theirs)
    largest = max(np.abs(gradient).max() for gradient in theirs.values())
    return max(np.abs(ours[n] - theirs[n]).max() for n in theirs) / largest


def can_split(lowered: Lowered, entry: zoo.Entry) -> bool:
    """Says whether trunk and embedding come apart; apart they must be the whole."""
    variables, inputs = lowered.variables, entry.inputs()
    try:
        final = lowered.apply(variables, inputs, method="hidden")
        logits = lowered.apply(variables, final, method="unembed")
    except LoweringError:
        return False
    whole = lowered.apply(variables, inputs).logits
    np.testing.assert_allclose(logits, whole, atol=ZOO_OUTPUT * float(jnp.std(whole)))
    return True


@pytest.mark.parametrize(
    "name",
    [
        n if n in SAMPLE else pytest.param(n, marks=pytest.mark.full)
        for n in sorted(ZOO)
    ],
)
def test_a_model_and_its_gradients_are_torchs(name: str, zoo_rows: list[Any]) -> None:
    entry = ZOO[name]
    model = entry.build()
    lowered = lower(model, entry.inputs(), dynamic=False, check=False)
    gap = check_parity(lowered, model)
    assert gap < ZOO_OUTPUT
    slope = gradient_gap(lowered, model, entry)
    assert slope < ZOO_GRADIENT
    split = can_split(lowered, entry)
    assert split or entry.group not in ("causal", "encoder-decoder")
    zoo_rows.append((entry.group, name, entry, lowered, gap, slope, split))


@pytest.fixture(scope="module")
def zoo_rows(request: pytest.FixtureRequest) -> Any:
    """Collects a row for each model that passes; a whole run writes the page."""
    rows: list[Any] = []
    yield rows
    if len(rows) == len(ZOO):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(rows), encoding="utf-8")


def page(rows: list[Any]) -> str:
    """Writes the table of docs/results/zoo.md."""
    lines = [
        "# What lowers",
        "",
        "Written by `make test-full`: tiny random models of each architecture, in",
        "float32, against torch. *Output* is the largest difference in standard",
        "deviations of the output, *gradient* the largest of any weight as a part of",
        "the largest gradient, *ops* the size of its graph. *Split* models come",
        "apart into trunk and output embedding, so their losses can be chunked.",
        "",
        "| kind | model | class | output | gradient | ops | blocks | split |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    order = ["causal", "encoder", "encoder-decoder", "vision", "speech"]
    for group, name, entry, lowered, gap, slope, split in sorted(
        rows, key=lambda row: (order.index(row[0]), row[1])
    ):
        made = lowered.programs.lowerings[0]
        note = f" ({entry.notes})" if entry.notes else ""
        lines.append(
            f"| {group} | {name}{note} | `{entry.model}` | {gap:.1e} | {slope:.1e} | "
            f"{made.num_ops} | {lowered.num_blocks} | {'yes' if split else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def test_every_promised_family_is_in_the_zoo() -> None:
    promised = (
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi phi3 gpt2 gpt_neox gptj "
        "opt bloom falcon olmo olmo2 olmo3 smollm3 granite cohere cohere2 starcoder2 "
        "stablelm glm4 exaone4 mixtral qwen2_moe qwen3_moe olmoe granitemoe "
        "deepseek_v2 deepseek_v3 gpt_oss gemma3n qwen3_next mamba mamba2 lfm2 "
        "glm4_moe mpt bert roberta distilbert electra albert deberta_v2 modernbert t5 "
        "bart marian whisper vit dinov2 siglip_vision siglip_text clip convnext "
        "wav2vec2"
    )
    assert set(promised.split()) <= set(ZOO)
