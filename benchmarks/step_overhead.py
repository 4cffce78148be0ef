"""Benchmark of the trainer's overhead over the bare jitted step.

    python benchmarks/step_overhead.py [ROUNDS]

Both train the same small decoder on the same batches, alternately; the median
ratio is printed. The trainer logs once at the end, so that its dispatch is measured.
"""

import sys
import time
from statistics import median
from typing import Any

import jax
import numpy as np

from dew.nn.config import MLP, Attention, DecoderConfig
from dew.nn.decoder import Decoder
from dew.nn.rope import Rope
from dew.objectives.causal_lm import CausalLM
from dew.source import Source
from dew.training.callbacks import Callback
from dew.training.logs import Log
from dew.training.optimizers import adamw
from dew.training.step import TrainStep
from dew.training.trainer import Trainer

STEPS, ROWS, SEQ = 20, 4, 128


def objective() -> CausalLM:
    config = DecoderConfig(
        vocab=2048,
        embed=128,
        layers=4,
        attention=Attention(heads=4, kv_heads=2, head_dim=32, rope=Rope(dim=32)),
        mlp=MLP(dim=384),
    )
    return CausalLM(source=Source(model=Decoder(config)), seq_len=SEQ)


def batches(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"tokens": rng.integers(0, 2048, (ROWS, SEQ), dtype=np.int32)}
        for _ in range(count)
    ]


def main(rounds: int = 7) -> None:
    data = batches(STEPS)
    step = TrainStep(objective=objective(), optimizer=adamw(1e-3).transform)
    attempt = jax.jit(step.attempt, donate_argnums=0)
    initial = jax.jit(step.initial)
    trainer = Trainer(objective(), adamw(1e-3), key=jax.random.key(0))

    def bare() -> float:
        state = initial(step.objective.initializer, jax.random.key(0), data[0])
        state, _ = attempt(state, data[0])
        jax.block_until_ready(state)
        began = time.perf_counter()
        for batch in data[1:]:
            state, _ = attempt(state, batch)
        jax.block_until_ready(state)
        return (time.perf_counter() - began) / (STEPS - 1)

    def by_trainer() -> float:
        clock = Clock()
        trainer.callbacks = (clock,)
        trainer.fit(iter(data), steps=STEPS, log_every=STEPS)
        return clock.log.seconds / len(clock.log.commits)

    ratios, times = [], []
    for _ in range(rounds):
        times.append((bare(), by_trainer()))
        ratios.append(times[-1][1] / times[-1][0])
    bare_s, trained_s = (median(column) for column in zip(*times, strict=True))
    print(f"bare step {bare_s * 1e3:.2f} ms, in the trainer {trained_s * 1e3:.2f} ms")
    print(f"ratio, median of {rounds}: {median(ratios):.3f}")


class Clock(Callback):
    """Stores the last log: all commits but the first, which compiles."""

    log: Log

    def on_log(self, log: Log) -> None:
        self.log = log


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
