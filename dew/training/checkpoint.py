"""Checkpoints by orbax: asynchronous, atomic, and complete down to the data position.

Leaves that a run holds and never moves are not written where the objective supplies
them; their content hash is, and resuming with other weights is an error. Of all others
there are checksums beside them, compared when a checkpoint is read.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath
from textwrap import shorten
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers
from rich.console import Console

from dew.objectives.base import AnyObjective
from dew.processes import agree_process_phase, exchange_messages
from dew.state import TrainState
from dew.training.checksums import array_checksum, checksum_text, json_checksum
from dew.training.event_loops import one_error_only
from dew.training.held import held_hashes, held_paths, leaf_hash, supplied_paths
from dew.tree import array_text, unflatten
from dew.typing import Path, Variables

Read = TypeVar("Read")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints are kept: the `last` n, every `period` commits, and the best.

    With fewer than two there may be nothing to go back to from a damaged one. `best`
    names an evaluation metric, such as `validation/perplexity`, of which the lowest
    value is best, or with `higher` the highest.
    """

    last: int = 2
    period: int | None = None
    best: str | None = None
    higher: bool = False

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"Keep.last must be >= 1, got {self.last}")


def _policy(keep: Keep) -> managers.AnyPreservationPolicy:
    """Builds orbax's preservation policy of these rules."""
    policies: list[managers.PreservationPolicy] = [managers.LatestN(keep.last)]
    if keep.period is not None:
        policies.append(managers.EveryNSteps(keep.period))
    if keep.best is not None:
        name = keep.best
        policies.append(
            managers.BestN(
                get_metric_fn=lambda metrics: metrics[name],
                reverse=not keep.higher,
                n=1,
                keep_checkpoints_without_metrics=False,
            )
        )
    return managers.AnyPreservationPolicy(policies)


class Checkpoints:
    """The checkpoints of one run, in one folder, named by commit.

    `every` is the period in commits at which a trainer saves. Every checkpoint has
    checksums; without `verify` they are not compared when one is read.

    >>> import jax, tempfile, dew
    >>> from dew.objectives.causal_lm import CausalLM
    >>> from dew.training import TrainStep, sgd
    >>> objective = CausalLM(source=dew.load(FOLDER), seq_len=4)
    >>> step = TrainStep(objective=objective, optimizer=sgd(0.1).transform)
    >>> state = jax.jit(step.initial)(objective.initializer, jax.random.key(0))
    >>> checkpoints = Checkpoints(tempfile.mkdtemp())
    >>> checkpoints.save(state, objective, data={"row": 5})
    0
    >>> checkpoints.wait()
    >>> state, position = checkpoints.restore(state, objective)
    >>> checkpoints.steps(), position
    ([0], {'row': 5})
    >>> checkpoints.close()
    """

    def __init__(
        self,
        folder: str | FilePath,
        *,
        every: int = 500,
        keep: Keep | None = None,
        verify: bool = True,
    ) -> None:
        if every < 1:
            raise ValueError(f"Checkpoints.every must be >= 1, got {every}")
        self.folder = FilePath(folder).absolute()
        self.every = every
        self.verify = verify
        self.keep = Keep() if keep is None else keep
        best = self.keep.best
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_policy(self.keep),
            # Without it, orbax writes no metrics for the policy to go by.
            best_fn=None if best is None else lambda metrics: metrics[best],
            best_mode="max" if self.keep.higher else "min",
            enable_async_checkpointing=True,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._held: dict[str, str] | None = None

    def latest(self) -> int | None:
        """Returns the commit of the newest complete checkpoint, None without one."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Returns the commits that have a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """Returns the commit that is best by `Keep.best`, None without one."""
        return None if self.keep.best is None else self._manager.best_step()

    def save(
        self,
        state: TrainState,
        objective: AnyObjective,
        *,
        data: Mapping[str, object] | None,
        metrics: Mapping[str, float] | None = None,
        held: Iterable[Path] | None = None,
    ) -> int:
        """Starts writing a state and the data's position; returns its commit.

        Arrays are copied before this returns, so the next step may donate them. Of the
        leaves at `held` (`held_paths`), None for those of collections that the
        objective declares, hashes are written.

        Raises:
            OSError: an earlier write failed, on a full disk for example.
        """
        step = int(state.commits)
        hashes = self._hashes(state, objective, held)
        moving = {
            name: leaf for name, leaf in _leaves(state).items() if name not in hashes
        }
        # Shapes and hashes stand beside the arrays, so that a checkpoint of another run
        # is refused by name before orbax reads, and reshapes or fails on, any of it.
        meta = {
            "held": hashes,
            "leaves": {n: array_text(x) for n, x in moving.items()},
            "checksums": _checksums(moving),
            "data": json_checksum({"position": data}),
        }
        meta["checksum"] = json_checksum(meta)
        self.wait()
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(moving),
                data=ocp.args.JsonSave({"position": data}),
                meta=ocp.args.JsonSave(meta),
            ),
            metrics=None if metrics is None else dict(metrics),
            force=True,
        )
        return step

    def restore(
        self,
        state: TrainState,
        objective: AnyObjective,
        *,
        step: int | None = None,
        held: Iterable[Path] | None = None,
    ) -> tuple[TrainState, Any]:
        """Returns a saved state, placed as `state` is, and the data's position.

        `state` is a new run's: it gives the structure, and the leaves at `held`, as
        `save` takes it. Where the newest checkpoint is damaged, the newest intact one
        is taken, with a line on stderr, and the damaged ones are renamed, so that the
        run can save anew.

        Raises:
            ValueError: there is no such checkpoint, or none that is intact, or it is of
                another model, or its run was trained over other held weights.
        """
        hashes = self._hashes(state, objective, held)

        def read(step: int) -> tuple[TrainState, Any]:
            return self._read_state(state, hashes, step)

        restored, damaged = self._newest_intact(read, step)
        if damaged:
            self._set_aside(damaged)
        return restored

    def variables(self, *, step: int | None = None, ema: bool = True) -> Variables:
        """Returns the variables of a saved state, without reading its optimizer.

        With `ema`, averaged leaves replace live ones where the run kept an average.
        Held leaves are absent: they were not written. A damaged checkpoint is passed
        over as in `restore`, and left in its place.

        Raises:
            ValueError: there is no such checkpoint, or none that is intact.
        """

        def read(step: int) -> Variables:
            return self._read_variables(step, ema)

        return self._newest_intact(read, step)[0]

    def wait(self) -> None:
        """Blocks until every started checkpoint is on disk.

        Raises:
            OSError: something could not be written, on a full disk for example.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as fault:
            raise OSError(
                f"a checkpoint could not be written to {self.folder}: "
                f"{str(fault).splitlines()[0]}; the last complete one is of commit "
                f"{self.latest()}"
            ) from fault

    def close(self) -> None:
        """Waits for pending writes and closes orbax's manager of the folder."""
        self._manager.close()

    def _resolve_step(self, step: int | None) -> int:
        """Returns `step`, or the newest where None, if it has a checkpoint."""
        step = self.latest() if step is None else step
        if step is None or step not in self.steps():
            raise ValueError(
                f"{self.folder} holds no checkpoint"
                + ("" if step is None else f" of commit {step}; it has {self.steps()}")
            )
        return step

    def _newest_intact(
        self, read: Callable[[int], Read], step: int | None
    ) -> tuple[Read, list[int]]:
        """Reads `step`, or the newest intact checkpoint; returns the damaged, too."""
        newest = self._resolve_step(step)
        candidates = [newest] if step is not None else self.steps()[::-1]
        damages: dict[int, str] = {}
        for candidate in candidates:
            try:
                found = read(candidate)
            except DamagedCheckpointError as damage:
                damages[candidate] = str(damage)
                continue
            for damaged, fault in damages.items():
                _tell(
                    f"the checkpoint of commit {damaged} in {self.folder} is damaged "
                    f"({fault}); that of commit {candidate} is taken in its place"
                )
            return found, list(damages)
        faults = "; ".join(f"commit {at}: {fault}" for at, fault in damages.items())
        others = [at for at in self.steps() if at not in damages]
        instead = f"give step= one of {others}, " if others else ""
        raise DamagedCheckpointError(
            f"{self.folder} has no intact checkpoint to read: {faults}; {instead}copy "
            "the files again if there is another copy, or start in another folder"
        )

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Renames checkpoints, so that their commits can be saved again."""
        if jax.process_index() == 0:
            for step in steps:
                target, count = self.folder / f"damaged-{step}", 1
                while target.exists():
                    count += 1
                    target = self.folder / f"damaged-{step}-{count}"
                (self.folder / str(step)).rename(target)
                _tell(f"the damaged checkpoint is kept as {target}")
        agree_process_phase("the renaming of a damaged checkpoint")
        self._manager.reload()

    def _read_state(
        self, state: TrainState, hashes: Mapping[str, str], step: int
    ) -> tuple[TrainState, Any]:
        meta = _on_all_processes(lambda: self._read_meta(step))
        leaves = _leaves(state)
        self._check(meta, leaves, _comparable(hashes, meta, leaves), step)
        # With the new run's shardings each process reads its own part of an array,
        # whatever mesh wrote it; held leaves are in no checkpoint and stay.
        target = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in leaves.items()
            if name in meta["leaves"]
        }
        arrays, position = _on_all_processes(
            lambda: (
                self._read_arrays(step, target),
                self._read_position(step, meta),
            )
        )
        self._compare(meta, arrays)
        self._check_written(arrays, hashes, step)
        return _with_leaves(state, {**leaves, **arrays}), position

    def _read_variables(self, step: int, ema: bool) -> Variables:
        meta = _on_all_processes(lambda: self._read_meta(step))
        prefixes = ("variables/", "ema/") if ema else ("variables/",)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = {
            name: _shape_of(text, here)
            for name, text in meta["leaves"].items()
            if name.startswith(prefixes)
        }
        saved = _on_all_processes(lambda: self._read_arrays(step, target))
        self._compare(meta, saved)
        live, averaged = (
            {n.removeprefix(head): x for n, x in saved.items() if n.startswith(head)}
            for head in ("variables/", "ema/")
        )
        # An average may be wider than the leaf that it follows.
        averaged = {n: x.astype(live[n].dtype) for n, x in averaged.items()}
        leaves = {tuple(name.split("/")): x for name, x in (live | averaged).items()}
        return unflatten(leaves)

    def _read_arrays(
        self, step: int, target: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Any]:
        """Reads leaves by name; each process its own parts, without the others."""
        args = ocp.args.PyTreeRestore(
            item=dict(target),
            restore_args=ocp.checkpoint_utils.construct_restore_args(dict(target)),
            partial_restore=True,
        )
        # orbax's barriers would wait for a process that found damage and left.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=None,
            active_processes={jax.process_index()},
            barrier_sync_key_prefix=f"process{jax.process_index()}",
        )
        reader = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
            multiprocessing_options=alone,
        )
        with _damage_of("its arrays cannot be read"), one_error_only():
            arrays = dict(reader.restore(self.folder / str(step) / "state", args=args))
            # A leaf that orbax does not find comes back as the shape asked for.
            lost = [n for n in target if not isinstance(arrays.get(n), jax.Array)]
            if lost:
                raise ValueError(f"there is no {_few(lost)}")
        return arrays

    def _compare(self, meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Raises where arrays differ from the checksums taken when they were saved."""
        if not self._has_checksums(meta):
            return
        then, now = meta["checksums"], _checksums(arrays)
        faults = [name for name in now if now[name] != then.get(name)]
        if faults:
            raise DamagedCheckpointError(f"checksums differ of {_few(faults)}")

    def _read_position(self, step: int, meta: Mapping[str, Any]) -> Any:
        """Returns the data's position, verified."""
        data = self._read_json(step, "data")
        if self._has_checksums(meta) and json_checksum(data) != meta["data"]:
            raise DamagedCheckpointError("the data's position differs from its hash")
        return data["position"]

    def _read_meta(self, step: int) -> dict[str, Any]:
        """Returns the shapes, hashes and checksums of a checkpoint, verified."""
        meta = self._read_json(step, "meta")
        if self._has_checksums(meta):
            rest = {name: value for name, value in meta.items() if name != "checksum"}
            if meta.get("checksum") != json_checksum(rest):
                raise DamagedCheckpointError("its list of leaves differs from its hash")
        elif self.verify:
            _tell(
                f"the checkpoint of commit {step} in {self.folder} is from before "
                "checkpoints had checksums, and is not verified"
            )
        return meta

    def _read_json(self, step: int, item: str) -> dict[str, Any]:
        """Returns the fields of a JSON file that orbax wrote."""
        file = self.folder / str(step) / item / "metadata"
        fields = {"meta": ("held", "leaves"), "data": ("position",)}[item]
        with _damage_of(f"{item}/{file.name} cannot be read"):
            read = json.loads(file.read_text(encoding="utf-8"))
            missing = [name for name in fields if name not in read]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
        return read

    def _has_checksums(self, meta: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is to be verified; older ones have no checksums."""
        # These exact fields are the older form: one damaged name is not taken for it.
        return self.verify and set(meta) != {"held", "leaves"}

    def _check(
        self,
        meta: Mapping[str, Any],
        leaves: Mapping[str, Any],
        held: Mapping[str, str],
        step: int,
    ) -> None:
        """Raises where the checkpoint is of another model or other held weights."""
        current = {
            name: array_text(x) for name, x in leaves.items() if name not in held
        }
        faults = _mismatches(meta["leaves"], current, "saved", "in this run")
        faults += _mismatches(meta["held"], dict(held), "then held", "now held")
        self._refuse(faults, step)

    def _check_written(
        self, saved: Mapping[str, Any], hashes: Mapping[str, str], step: int
    ) -> None:
        """Raises where held leaves that were written have other values now."""
        written = {n: leaf_hash(saved[n]) for n in hashes if n in saved}
        now = {name: hashes[name] for name in written}
        self._refuse(_mismatches(written, now, "saved with", "now held"), step)

    def _refuse(self, faults: list[str], step: int) -> None:
        if faults:
            more = f" … and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise ValueError(
                f"the checkpoint of commit {step} in {self.folder} is of another model "
                "or run: " + "; ".join(faults[:8]) + more
            )

    def _hashes(
        self, state: TrainState, objective: AnyObjective, held: Iterable[Path] | None
    ) -> dict[str, str]:
        """Returns the content hashes of the leaves that the run holds, made once."""
        if self._held is None:
            variables = state.variables
            if held is None:
                supplied = supplied_paths(objective.initializer)
                held = held_paths(objective, supplied, variables, None)
            self._held = held_hashes(variables, held)
        return self._held


class DamagedCheckpointError(ValueError):
    """A checkpoint's files are not those that were written, or cannot be read."""


@contextmanager
def _damage_of(what: str) -> Iterator[None]:
    """Raises any error of orbax as damage, unless memory or a permission is lacking."""
    try:
        yield
    except (MemoryError, PermissionError):
        raise
    # Damaged files raise errors of nearly every type, from orbax and what it reads by.
    except Exception as fault:
        if "RESOURCE_EXHAUSTED" in str(fault):
            raise
        lines = str(fault).strip().splitlines()
        cause = shorten(lines[0], 200) if lines else type(fault).__name__
        raise DamagedCheckpointError(f"{what}: {cause}") from fault


def _on_all_processes(read: Callable[[], Read]) -> Read:
    """Returns what this process reads; damage that one finds is raised by all."""
    found: list[Read] = []
    message, fault = "", None
    try:
        found.append(read())
    except DamagedCheckpointError as damage:
        message = str(damage)
    except Exception as raised:
        fault = raised
    messages = exchange_messages("the reading of a checkpoint", message, fault)
    for damage in filter(None, messages):
        raise DamagedCheckpointError(damage)
    return found[0]


def _tell(line: str) -> None:
    """Prints a line on stderr, once of all processes."""
    console = Console(stderr=True, quiet=jax.process_index() > 0)
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _checksums(leaves: Mapping[str, Any]) -> dict[str, str]:
    """Returns the checksum of every leaf, as text."""
    # One after the other: a CPU's collectives may wait for each other for good where
    # several programs that have some are under way.
    return {
        name: checksum_text(np.asarray(array_checksum(leaf)))
        for name, leaf in leaves.items()
    }


def _comparable(
    hashes: Mapping[str, str], meta: Mapping[str, Any], leaves: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the hashes of the leaves for which a checkpoint has a hash, too.

    Which leaves a run holds may have been declared otherwise when it was written.
    """
    others = [name for name in meta["held"] if name in leaves and name not in hashes]
    known = {**hashes, **{name: leaf_hash(leaves[name]) for name in others}}
    return {name: known[name] for name in known if name not in meta["leaves"]}


def _leaves(state: TrainState) -> dict[str, Any]:
    """Returns every array of a state by name, random keys as their raw numbers."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _plain(leaf)
        for path, leaf in flat
    }


def _with_leaves(state: TrainState, leaves: Mapping[str, Any]) -> TrainState:
    def replace_leaf(path: Any, old: Any) -> Any:
        new = leaves[jax.tree_util.keystr(path, simple=True, separator="/")]
        return jax.random.wrap_key_data(new) if _is_key(old) else new

    return jax.tree_util.tree_map_with_path(replace_leaf, state)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _shape_of(text: str, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype that `array_text` wrote."""
    dtype, _, sizes = text.rstrip("]").partition("[")
    shape = [int(size) for size in sizes.split(",") if size]
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def _mismatches(
    then: Mapping[str, str], now: Mapping[str, str], was: str, is_: str
) -> list[str]:
    return [
        f"{name}: {was} {then.get(name, 'nothing')}, {is_} {now.get(name, 'nothing')}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
