"""JAX functions inside torch, and weights handed over in memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dew.bridges import (
    as_torch_module,
    fill_module,
    lower,
    state_dict_of,
    variables_of,
)
from tests.support import hf_models as hf
from tests.support.tolerances import ATOL, LOGITS, RTOL

WEIGHT = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


def layer(variables: Any, x: jax.Array, *, power: int = 1) -> dict[str, jax.Array]:
    out = jnp.tanh(x @ variables["params"]["layer"]["weight"]) ** power
    return {"out": out, "count": jnp.sum(x > 0)}


@pytest.fixture
def module() -> torch.nn.Module:
    variables = {
        "params": {"layer": {"weight": jnp.asarray(WEIGHT)}},
        "buffers": {"step": jnp.zeros((), jnp.int32)},
    }
    return as_torch_module(layer, variables)


def reference(weight: torch.Tensor, x: torch.Tensor, power: int) -> torch.Tensor:
    return torch.tanh(x @ weight) ** power


def test_torch_differentiates_for_inputs_and_weights(module: torch.nn.Module) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    weight = torch.tensor(WEIGHT, requires_grad=True)
    out = module(x, power=3)["out"]
    want = reference(weight, x, 3)
    torch.testing.assert_close(
        out, want, rtol=RTOL["float32"], atol=ATOL["small float32"]
    )
    ours = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    theirs = torch.autograd.grad(want.square().sum(), [x, weight])
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            left, right, rtol=RTOL["float32"], atol=ATOL["small float32"]
        )


def test_integers_come_out_and_carry_no_gradient(module: torch.nn.Module) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    count = module(x)["count"]
    assert int(count) == 8
    assert not count.requires_grad


def test_its_state_dict_has_the_paths_within_the_collections(
    module: torch.nn.Module,
) -> None:
    assert set(module.state_dict()) == {"layer.weight", "step"}
    assert [name for name, _ in module.named_parameters()] == ["layer.weight"]


def test_one_name_in_two_collections_is_refused() -> None:
    variables = {"params": {"w": jnp.ones(2)}, "buffers": {"w": jnp.ones(2)}}
    with pytest.raises(ValueError, match="w are in more than one collection"):
        as_torch_module(layer, variables)


def test_a_torch_optimizer_trains_it(module: torch.nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    target = torch.tanh(x @ torch.randn(4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        loss = (module(x)["out"] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_an_input_changed_before_backward_is_refused(module: torch.nn.Module) -> None:
    x = torch.randn(2, 4)
    out = module(x)["out"].sum()
    with torch.no_grad():
        next(module.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_it_calls_without_gradients(module: torch.nn.Module) -> None:
    with torch.no_grad():
        out = module(torch.ones(2, 4))["out"]
    assert out.grad_fn is None
    assert out.shape == (2, 3)


def test_a_lowered_model_comes_back_to_torch_whole() -> None:
    model = hf.llama()
    ids = hf.tokens(2, 8)
    lowered = lower(model, {"tokens": ids}, dynamic=False, check=False)

    def logits(variables: Any, tokens: jax.Array) -> Any:
        return lowered.apply(variables, {"tokens": tokens}).logits

    wrapped = as_torch_module(logits, lowered.variables)
    out = wrapped(torch.tensor(ids, dtype=torch.int32))
    assert (
        hf.largest_difference(out.detach().numpy(), hf.torch_logits(model, ids))
        < LOGITS
    )
    out.square().mean().backward()
    model(torch.tensor(ids)).logits.square().mean().backward()
    ours = wrapped.get_parameter("model.layers.0.mlp.up_proj.weight").grad
    theirs = model.model.layers[0].mlp.up_proj.weight.grad
    assert ours is not None
    assert hf.largest_difference(ours.numpy(), theirs.numpy()) < LOGITS


def test_weights_go_over_and_back_in_memory() -> None:
    model, other = (
        hf.llama(0, tie_word_embeddings=True),
        hf.llama(1, tie_word_embeddings=True),
    )
    variables = variables_of(model)
    fill_module(other, variables)
    ids = hf.tokens()
    np.testing.assert_array_equal(
        hf.torch_logits(other, ids), hf.torch_logits(model, ids)
    )
    names = set(state_dict_of(variables))
    assert names == set(model.state_dict()) - {"lm_head.weight"}


def test_shared_variables_are_the_modules_own_memory() -> None:
    model = hf.llama()
    variables = variables_of(model, copy=False)
    array = variables["params"]["model"]["norm"]["weight"]
    assert array.unsafe_buffer_pointer() == model.model.norm.weight.data_ptr()


def test_variables_that_do_not_fit_a_module_change_nothing() -> None:
    variables = variables_of(hf.llama(hidden_size=64, num_hidden_layers=1))
    model = hf.llama()
    before = model.model.norm.weight.clone()
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1.*is \[64\]"):
        fill_module(model, variables)
    assert torch.equal(model.model.norm.weight, before)
