"""Modules as people write them: recurrent layers, several outputs, plain inputs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import dew.bridges
from dew.bridges.lowering.errors import LoweringError
from tests.support.tolerances import ZOO_GRADIENT, ZOO_OUTPUT

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
FLAGS: tuple[dict[str, Any], ...] = (
    {},
    {"num_layers": 2, "batch_first": True, "bidirectional": True},
    {"num_layers": 2, "bias": False},
)
CASES = [
    *((kind, flags) for kind in KINDS for flags in FLAGS),
    ("lstm", {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
    ("rnn", {"nonlinearity": "relu", "bias": False}),
]


def arrays(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(got: Any, want: Any, bar: float) -> None:
    np.testing.assert_allclose(got, want.detach().numpy(), atol=bar, rtol=bar)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("kind", "flags"), CASES)
def test_a_recurrent_layer_and_its_gradients_are_torchs(
    kind: str, flags: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    module, x = KINDS[kind](3, 4, **flags), arrays(5, 2, 3)
    lowered = dew.bridges.lower(module, x)

    def total(variables: Any) -> Any:
        outputs = lowered.outputs(variables, x)
        return sum(jnp.sum(jnp.sin(part)) for part in outputs.values())

    value, gradient = jax.value_and_grad(total)(lowered.variables)
    out, state = module(torch.tensor(x))
    parts = [out, *(state if isinstance(state, tuple) else (state,))]
    want = torch.stack([part.sin().sum() for part in parts]).sum()
    want.backward()
    close(value, want, ZOO_OUTPUT)
    for name, parameter in module.named_parameters():
        close(gradient["params"][name], parameter.grad, ZOO_GRADIENT)


def test_a_recurrent_layer_takes_the_states_it_starts_from() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            return self.cell(x, start)[0]

    module, inputs = Encoder(), (arrays(2, 5, 3), arrays(1, 2, 4, seed=1))
    lowered = dew.bridges.lower(module, inputs)
    close(
        lowered.apply(lowered.variables, inputs).logits,
        module(*map(torch.tensor, inputs)),
        ZOO_OUTPUT,
    )


def test_packed_sequences_are_refused_by_name() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, [5, 3], batch_first=True)
            return self.cell(packed)[1][0]

    with pytest.raises(LoweringError, match="PackedSequence has no counterpart"):
        dew.bridges.lower(Packed(), arrays(2, 5, 3))


def test_dropout_between_layers_draws_in_training() -> None:
    module, x = nn.LSTM(3, 4, num_layers=2, dropout=0.5), arrays(5, 2, 3)
    lowered = dew.bridges.lower(module, x)

    def drawn(key: int) -> np.ndarray:
        rngs = {"dropout": jax.random.key(key)}
        outputs = lowered.outputs(lowered.variables, x, train=True, rngs=rngs)
        return np.asarray(outputs["0"])

    assert (drawn(0) == drawn(0)).all()
    assert (drawn(0) != drawn(1)).any()


@dataclass
class Record:
    mean: torch.Tensor
    parts: dict[str, torch.Tensor]


class Several(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        one, two = x + 1, x * 2
        return {
            "tuple": (one, two),
            "dict": {"one": one, "two": {"deep": two}},
            "record": Record(one, {"two": two}),
            "list": [one, [two]],
        }[self.kind]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tuple", ("0", "1")),
        ("dict", ("one", "two.deep")),
        ("record", ("mean", "parts.two")),
        ("list", ("0", "1.0")),
    ],
)
def test_every_tensor_that_a_module_returns_has_a_name(
    kind: str, names: tuple[str, str]
) -> None:
    x = arrays(2, 3)
    lowered = dew.bridges.lower(Several(kind), {"x": x})
    outputs = lowered.outputs(lowered.variables, {"x": x})
    assert tuple(outputs) == names
    np.testing.assert_array_equal(outputs[names[0]], x + 1)
    np.testing.assert_array_equal(outputs[names[1]], x * 2)
    with pytest.raises(ValueError, match=rf"returns {names[0]}, .*outputs\("):
        lowered.apply(lowered.variables, {"x": x})


def test_statistics_are_not_lost_in_training() -> None:
    module, x = nn.BatchNorm1d(3), arrays(4, 3)
    lowered = dew.bridges.lower(module, x)
    with pytest.raises(ValueError, match=r"running_mean.*mutable=\['buffers'\]"):
        lowered.apply(lowered.variables, x, train=True)
    _, moved = lowered.apply(lowered.variables, x, train=True, mutable=["buffers"])
    assert np.abs(moved["buffers"]["running_mean"]).max() > 0
