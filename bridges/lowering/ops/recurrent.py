"""Recurrent layers: LSTM, GRU and the plain RNN, as scans over time.

Parameters come as torch lists them: for each layer and direction the input and the
hidden matrix, the two biases if there are any, and the projection of an LSTM that has
one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from dew.bridges.lowering.ops.op import Op
from dew.bridges.lowering.ops.random import drop

State: TypeAlias = tuple[Array, ...]
"""Hidden state [batch, hidden] of one direction, and the cell state of an LSTM."""

Cell: TypeAlias = Callable[[Array, Array, State, Array | None], State]
"""Next state of: input gates, hidden gates, state, projection of the hidden state."""


def _lstm_cell(x: Array, h: Array, state: State, project: Array | None) -> State:
    i, f, g, o = jnp.split(x + h, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden if project is None else hidden @ project.T, cell)


def _gru_cell(x: Array, h: Array, state: State, project: Array | None) -> State:
    (rx, zx, nx), (rh, zh, nh) = (jnp.split(gates, 3, axis=-1) for gates in (x, h))
    reset, update = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
    new = jnp.tanh(nx + reset * nh)
    return ((1 - update) * new + update * state[0],)


def _plain_cell(
    activation: Callable[[Array], Array],
    x: Array,
    h: Array,
    state: State,
    project: Array | None,
) -> State:
    return (activation(x + h),)


def _one_direction(
    cell: Cell,
    inputs: Array,
    state: State,
    params: Sequence[Array],
    *,
    has_biases: bool,
    reverse: bool,
) -> tuple[Array, State]:
    """Returns the hidden states [time, batch, hidden] and the last state."""
    weight_x, weight_h, *others = params
    bias_x, bias_h = others[:2] if has_biases else (0, 0)
    projections = others[2:] if has_biases else others
    project = projections[0] if projections else None
    # All inputs at once: one large product in place of one for each step.
    gates = inputs @ weight_x.T + bias_x

    def step(state: State, x: Array) -> tuple[State, Array]:
        new = cell(x, state[0] @ weight_h.T + bias_h, state, project)
        return new, new[0]

    last, hidden = jax.lax.scan(step, state, gates, reverse=reverse)
    return hidden, last


def _layers(
    cell: Cell,
    input: Array,
    start: State,
    params: Sequence[Array],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    rng: Array | None,
) -> tuple[Array, ...]:
    """Returns the output of the last layer, and the last states of all layers."""
    x = jnp.swapaxes(input, 0, 1) if batch_first else input
    directions = 2 if bidirectional else 1
    count = len(params) // (num_layers * directions)
    ends: list[State] = []
    for layer in range(num_layers):
        if layer and dropout and train and rng is not None:
            x = drop(x, dropout, jax.random.fold_in(rng, layer))
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            hidden, last = _one_direction(
                cell,
                x,
                tuple(part[place] for part in start),
                params[place * count : (place + 1) * count],
                has_biases=has_biases,
                reverse=direction == 1,
            )
            outputs.append(hidden)
            ends.append(last)
        x = jnp.concatenate(outputs, axis=-1)
    out = jnp.swapaxes(x, 0, 1) if batch_first else x
    return out, *(jnp.stack(parts) for parts in zip(*ends, strict=True))


def _lstm(
    input: Array,
    hx: Sequence[Array],
    params: Sequence[Array],
    *flags: Any,
    rng: Array | None = None,
) -> tuple[Array, ...]:
    return _layers(_lstm_cell, input, tuple(hx), params, *flags, rng=rng)


def _one_state(
    cell: Cell,
    input: Array,
    hx: Array,
    params: Sequence[Array],
    *flags: Any,
    rng: Array | None = None,
) -> tuple[Array, ...]:
    return _layers(cell, input, (hx,), params, *flags, rng=rng)


OPS: dict[str, Op] = {
    "aten.lstm.input": _lstm,
    "aten.gru.input": partial(_one_state, _gru_cell),
    "aten.rnn_tanh.input": partial(_one_state, partial(_plain_cell, jnp.tanh)),
    "aten.rnn_relu.input": partial(_one_state, partial(_plain_cell, jax.nn.relu)),
}
