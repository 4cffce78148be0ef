"""Entry point of `dew COMMAND …`, which reports bad input in one line."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, TypeAlias

# Before anything loads torch's OpenMP: spinning threads slow a shared machine five to
# fifteen times, and an idle one runs a fifth slower without them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import tyro
from rich.console import Console

from dew.api import CertificationError
from dew.cli.cache_teacher import CacheTeacher
from dew.cli.check import Check
from dew.cli.distill import Distill
from dew.cli.evaluate import Eval
from dew.cli.export import Export, Verify
from dew.cli.extend import Extend
from dew.cli.generate import Generate
from dew.cli.launch import Launch, join_launched
from dew.cli.pretrain import Pretrain
from dew.cli.prune import Prune
from dew.training.logs import TrainingError

Command: TypeAlias = (
    Annotated[Pretrain, tyro.conf.subcommand("pretrain")]
    | Annotated[Distill, tyro.conf.subcommand("distill")]
    | Annotated[CacheTeacher, tyro.conf.subcommand("cache-teacher")]
    | Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Prune, tyro.conf.subcommand("prune")]
    | Annotated[Extend, tyro.conf.subcommand("extend")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Launch, tyro.conf.subcommand("launch")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    The code is 0 for success, 1 for a failed check and 2 for bad input, with the error
    as one line on stderr. `DEW_TRACEBACK=1` prints the traceback instead.
    """
    command = tyro.cli(
        Command,
        args=arguments,
        prog="dew",
        description="The bridge between PyTorch and JAX for people who train models.",
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
    )
    try:
        join_launched()
        return command.run()
    except CertificationError as failed:
        _complain(str(failed))
        return 1
    except (ValueError, TypeError, OSError, ImportError, TrainingError) as fault:
        if os.environ.get("DEW_TRACEBACK"):
            raise
        _complain(str(fault))
        return 2


def _complain(fault: str) -> None:
    message = f"dew: error: {' '.join(fault.split())}"
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
