"""Checkpoints by orbax: asynchronous, atomic, and complete down to the data position.

Leaves that a run holds and never moves are not written where the objective supplies
them; their content hash is, and resuming with other weights is an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers

from dew.objectives.base import AnyObjective
from dew.state import TrainState
from dew.training.held import held_hashes, held_paths, leaf_hash, supplied_paths
from dew.tree import array_text, unflatten
from dew.typing import Path, Variables


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints are kept: the `last` n, every `period` commits, and the best.

    `best` names an evaluation metric, such as `validation/perplexity`, of which the
    lowest value is best, or with `higher` the highest.
    """

    last: int = 1
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

    `every` is the period in commits at which a trainer saves.

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
        self, folder: str | FilePath, *, every: int = 500, keep: Keep | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"Checkpoints.every must be >= 1, got {every}")
        self.folder = FilePath(folder).absolute()
        self.every = every
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
        meta = {"held": hashes, "leaves": {n: array_text(x) for n, x in moving.items()}}
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
        `save` takes it.

        Raises:
            ValueError: there is no such checkpoint, it is of another model, or its run
                was trained over other held weights.
        """
        step = self._resolve_step(step)
        meta = self._meta(step)
        leaves = _leaves(state)
        hashes = self._hashes(state, objective, held)
        self._check(meta, leaves, _comparable(hashes, meta, leaves), step)
        # With the new run's shardings each process reads its own part of an array,
        # whatever mesh wrote it; held leaves are in no checkpoint and stay.
        target = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in leaves.items()
            if name in meta["leaves"]
        }
        saved = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore()
            ),
        )
        self._check_written(saved["state"], hashes, step)
        restored = _with_leaves(state, {**leaves, **saved["state"]})
        return restored, saved["data"]["position"]

    def variables(self, *, step: int | None = None, ema: bool = True) -> Variables:
        """Returns the variables of a saved state, without reading its optimizer.

        With `ema`, averaged leaves replace live ones where the run kept an average.
        Held leaves are absent: they were not written.

        Raises:
            ValueError: there is no such checkpoint.
        """
        step = self._resolve_step(step)
        folder, handler = (
            epath.Path(self.folder / str(step) / "state"),
            ocp.PyTreeCheckpointHandler(),
        )
        prefixes = ("variables/", "ema/") if ema else ("variables/",)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
            for name, leaf in handler.metadata(folder).tree.items()
            if name.startswith(prefixes)
        }
        saved = ocp.Checkpointer(handler).restore(
            folder,
            args=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=True,
            ),
        )
        live, averaged = (
            {n.removeprefix(head): x for n, x in saved.items() if n.startswith(head)}
            for head in ("variables/", "ema/")
        )
        leaves = {tuple(name.split("/")): x for name, x in (live | averaged).items()}
        return unflatten(leaves)

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

    def _meta(self, step: int) -> Any:
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args)["meta"]

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


def _mismatches(
    then: Mapping[str, str], now: Mapping[str, str], was: str, is_: str
) -> list[str]:
    return [
        f"{name}: {was} {then.get(name, 'nothing')}, {is_} {now.get(name, 'nothing')}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
