"""A run small enough to train in seconds; as a program, one that can be killed.

    python -m tests.support.runs FOLDER STEPS LOSSES

appends one loss a line to LOSSES, resumes from FOLDER if it holds a checkpoint, and
pauses before every batch, so that a signal arrives in the middle of a run.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from dew.objectives.base import EMASpec
from dew.objectives.causal_lm import CausalLM
from dew.objectives.metrics import token_metrics
from dew.source import Source
from dew.training.callbacks import Callback
from dew.training.checkpoint import Checkpoints
from dew.training.evaluation import Evaluation
from dew.training.logs import Log
from dew.training.optimizers import adamw
from dew.training.trainer import Trainer
from dew.typing import Variables
from tests.support.models import tiny_decoder


class Rows:
    """Endless seeded batches of token ids, from any position on."""

    def __init__(self, *, rows: int = 8, pause_s: float = 0.0, end: int | None = None):
        self.rows, self.pause_s, self.end, self.position = rows, pause_s, end, 0

    def __iter__(self) -> "Rows":
        return self

    def __next__(self) -> dict[str, Any]:
        if self.position == self.end:
            raise StopIteration
        time.sleep(self.pause_s)
        rng = np.random.default_rng(self.position)
        self.position += 1
        return {"tokens": rng.integers(0, 11, (self.rows, 12), dtype=np.int32)}

    def get_state(self) -> dict[str, Any]:
        return {"position": self.position}

    def set_state(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Losses(Callback):
    """Keeps every commit's loss, in a file as well where one is given."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.losses, self.logs = path, [], []
        self.evaluations: dict[int, Mapping[str, float]] = {}

    def on_log(self, log: Log) -> None:
        self.logs.append(log)
        for commit in log.commits:
            self.losses.append(commit.loss)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(f"{commit.step} {commit.loss.hex()}\n")

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations[step] = metrics


def trainer(
    *,
    callbacks: Sequence[Callback] = (),
    ema: bool = True,
    variables: Variables | None = None,
    **settings: Any,
) -> Trainer:
    """A causal decoder of eleven words, two microbatches a commit by default."""
    objective = CausalLM(
        source=Source(model=tiny_decoder(dropout=0.1), variables=variables),
        seq_len=12,
        ema=EMASpec(optax.constant_schedule(0.9)) if ema else None,
    )
    settings = {"key": jax.random.key(0), "accumulation": 2, **settings}
    return Trainer(objective, adamw(1e-2), callbacks=callbacks, **settings)


def held_out(batches: int = 2) -> dict[str, Evaluation]:
    return {
        "held_out": Evaluation(
            batches=lambda: Rows(end=batches), metrics=token_metrics()
        )
    }


def main(folder: str, steps: str, losses: str) -> None:
    trainer(
        callbacks=[Losses(Path(losses))],
        checkpoints=Checkpoints(folder, every=2),
    ).fit(Rows(pause_s=0.02), steps=int(steps), log_every=1, resume=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
