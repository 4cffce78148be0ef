"""Benchmark of training steps of SmolLM2-135M, in dew and in torch.

    python benchmarks/train.py [ROUNDS]

Both make AdamW steps alternately on the same rows, 2 x 256 tokens in float32; ratios
of tokens per second are printed, medians over the rounds. Compilation is left out.
"""

import sys
import time
from pathlib import Path
from statistics import median

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import dew
from dew.objectives.causal_lm import CausalLM
from dew.training.optimizers import adamw
from dew.training.step import TrainStep

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.support.weights import cached

ROWS, SEQ, RATE = 2, 256, 1e-5


def main(rounds: int = 5) -> None:
    folder = cached("smollm2")
    ids = np.random.default_rng(0).integers(0, 49152, (ROWS, SEQ), dtype=np.int32)
    source = dew.load(folder)
    step = TrainStep(
        objective=CausalLM(source=source, seq_len=SEQ),
        optimizer=adamw(RATE).transform,
    )
    batch = {"tokens": jax.numpy.asarray(ids)}
    state = jax.jit(step.initial)(step.objective.initializer, jax.random.key(0), batch)
    attempt = jax.jit(step.attempt, donate_argnums=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    tokens = torch.from_numpy(ids).long()

    def dew_step() -> float:
        nonlocal state
        began = time.perf_counter()
        state, report = attempt(state, batch)
        jax.block_until_ready((state, report))
        return time.perf_counter() - began

    def torch_step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - began

    dew_step(), torch_step()
    pairs = [(dew_step(), torch_step()) for _ in range(rounds)]
    speeds = [
        median(ROWS * SEQ / t for t in column) for column in zip(*pairs, strict=True)
    ]
    print(f"dew {speeds[0]:.0f} tokens/s, torch {speeds[1]:.0f} tokens/s")
    print(f"ratio, median of {rounds}: {median(b / a for a, b in pairs):.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
