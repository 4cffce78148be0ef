"""Entry point of `dew COMMAND …`, which reports bad input in one line."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, TypeAlias

# Before anything loads torch's OpenMP: spinning threads slow a shared machine five to
# fifteen times, and an idle one runs a fifth slower without them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax
import tyro

from dew.api import CertificationError
from dew.cli.cache_teacher import CacheTeacher
from dew.cli.check import Check
from dew.cli.distill import Distill
from dew.cli.evaluate import Eval
from dew.cli.export import Export, Verify
from dew.cli.extend import Extend
from dew.cli.generate import Generate
from dew.cli.launch import Launch
from dew.cli.launched import is_one_of_several, join_launched
from dew.cli.parsing import complain, one_line_errors
from dew.cli.pretrain import Pretrain
from dew.cli.prune import Prune
from dew.processes import (
    ProcessError,
    leave_processes,
    name_lost_process,
    post_fault,
    process_phase,
)
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

SAID_IN_FULL = (
    CertificationError,
    ValueError,
    TypeError,
    OSError,
    ImportError,
    TrainingError,
    ProcessError,
)
"""Exceptions whose message says all there is to say."""

DESCRIPTION = "The bridge between PyTorch and JAX for people who train models."
"""First line of `dew --help`."""

SEVERAL = (Pretrain, Distill, CacheTeacher, Eval)
"""Commands whose work several processes share."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    The code is 0 for success, 1 for a failed check and 2 for bad input, with the error
    as one line on stderr; 130 after Ctrl-C and 143 after SIGTERM. `DEW_TRACEBACK=1`
    prints the traceback instead.
    """
    command = _parse(arguments)
    try:
        if isinstance(command, Launch):
            command.check()
            # Once, before any process starts: a wrong flag is one message, not many.
            launched = _parse(command.command)
            _check_launched(launched, command.processes)
            launched.check()
        elif is_one_of_several():
            _check_launched(command, 2)
        join_launched()
        with process_phase("checking the command"):
            command.check()
        return command.run()
    except KeyboardInterrupt as stopped:
        post_fault(stopped)
        return _leave(130)
    except Exception as fault:
        cause = name_lost_process(fault)
        post_fault(cause)
        if os.environ.get("DEW_TRACEBACK") or not isinstance(cause, SAID_IN_FULL):
            raise
        complain(str(cause))
        return _leave(1 if _is_failed_check(cause) else 2)


def _parse(arguments: Sequence[str] | None) -> Command:
    with one_line_errors():
        return tyro.cli(
            Command,
            args=arguments,
            prog="dew",
            description=DESCRIPTION,
            config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
        )


def _check_launched(command: Command, count: int) -> None:
    """Raises for a command that several processes cannot share."""
    if count == 1 or isinstance(command, SEVERAL):
        return
    raise ValueError(
        f"dew {type(command).__name__.lower()} is the work of one process: run it "
        "without dew launch (and without DEW_COORDINATOR); pretrain, distill, "
        "cache-teacher and eval share theirs"
    )


def _leave(code: int) -> int:
    """Returns an exit code, or exits where jax would first wait for other processes.

    They may be waiting for this one, in a collective that it never comes to.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        leave_processes()
        os._exit(code)
    return code


def _is_failed_check(fault: BaseException) -> bool:
    """Whether a certificate failed, here or in another process."""
    is_other = isinstance(fault, ProcessError)
    return isinstance(fault, CertificationError) or (
        is_other and f" {CertificationError.__name__}: " in str(fault)
    )


if __name__ == "__main__":
    sys.exit(main())
