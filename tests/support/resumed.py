"""A run of tests.support.runs as one of several processes, to be resumed by others.

    python -m tests.support.resumed ADDRESS COUNT INDEX FOLDER STEPS LOSSES FSDP

trains on COUNT processes with the same global batches whatever COUNT is, resumes from
FOLDER if it holds a checkpoint, and appends the losses to LOSSES on the first process.
"""

import sys
from pathlib import Path
from typing import Any

import jax

from dew.processes import connect_processes
from dew.training.checkpoint import Checkpoints
from dew.training.sharding import make_mesh
from tests.support.runs import Losses, Rows, trainer


class Share(Rows):
    """This process's rows of the global batches of `Rows`."""

    def __next__(self) -> dict[str, Any]:
        tokens = super().__next__()["tokens"]
        share = len(tokens) // jax.process_count()
        first = jax.process_index() * share
        return {"tokens": tokens[first : first + share]}


def main(folder: str, steps: str, losses: str, fsdp: str) -> None:
    seen = [Losses(Path(losses))] if jax.process_index() == 0 else []
    kept = Checkpoints(folder, every=1)
    ways = len(jax.devices()) // int(fsdp)
    trainer(
        callbacks=seen,
        checkpoints=kept,
        mesh=make_mesh(data=ways, fsdp=int(fsdp)),
    ).fit(Share(), steps=int(steps), log_every=1, resume=True)


if __name__ == "__main__":
    address, count, index, *rest = sys.argv[1:]
    if int(count) > 1:
        connect_processes(address, count=int(count), index=int(index))
    main(*rest)
