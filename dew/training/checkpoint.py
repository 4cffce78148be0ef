"""Checkpoints by orbax: asynchronous, atomic, and complete down to the data position.

Leaves that a run holds and never moves are not written where the objective supplies
them; their content hash is, and resuming with other weights is an error.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from dew.objectives.base import Objective
from dew.state import TrainState
from dew.tree import flatten, slashed, unflatten
from dew.typing import Variables


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay: the `last` n, every `period` commits, and the best.

    `best` names an evaluation's number, such as `validation/perplexity`; `higher` says
    that more of it is better.
    """

    last: int = 1
    period: int | None = None
    best: str | None = None
    higher: bool = False

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"Keep.last must be >= 1, got {self.last}")


def _policy(keep: Keep) -> Any:
    """The rules in orbax's words."""
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
    """The checkpoints of one run, in one folder, named by commit."""

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
        """The commit of the newest complete checkpoint, None where there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The commits that have a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The commit that is best by `Keep.best`, None where there is none."""
        return None if self.keep.best is None else self._manager.best_step()

    def save(
        self,
        state: TrainState,
        objective: Objective[Any, Any],
        *,
        data: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None = None,
    ) -> int:
        """Starts writing a state and the data's position; returns its commit.

        Arrays are copied before this returns, so the next step may donate them.

        Raises:
            OSError: an earlier write failed, for want of space for example.
        """
        step = int(state.commits)
        held = self._hashes(objective)
        moving = {
            name: leaf for name, leaf in _leaves(state).items() if name not in held
        }
        meta = {"held": held, "leaves": {n: _kind(x) for n, x in moving.items()}}
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
        objective: Objective[Any, Any],
        *,
        step: int | None = None,
    ) -> tuple[TrainState, Any]:
        """Returns a saved state, placed as `state` is, and the data's position.

        `state` is a new run's: it gives the structure, and the held leaves.

        Raises:
            ValueError: there is no such checkpoint, it is of another model, or the held
                weights are not those it was trained over.
        """
        step = self._existing(step)
        meta = self._meta(step)
        leaves = _leaves(state)
        self._check(meta, leaves, self._hashes(objective), step)
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
        restored = _with_leaves(state, {**leaves, **saved["state"]})
        return restored, saved["data"]["position"]

    def variables(self, *, step: int | None = None, ema: bool = True) -> Variables:
        """Returns the variables of a saved state, read without its optimizer.

        With `ema`, averaged leaves stand in place of live ones where the run kept an
        average. Held leaves that were not written are not among them.

        Raises:
            ValueError: there is no such checkpoint.
        """
        step = self._existing(step)
        kinds = self._meta(step)["leaves"]
        heads = ("variables/", "ema/") if ema else ("variables/",)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = {
            name: _shape(kind, here)
            for name, kind in kinds.items()
            if name.startswith(heads)
        }
        saved = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(
            self.folder / str(step) / "state",
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
        """Returns once everything is on disk.

        Raises:
            OSError: something could not be written, for want of space for example.
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
        """Waits, and lets go of the folder."""
        self._manager.close()

    def _existing(self, step: int | None) -> int:
        """The step asked for, or the newest one."""
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
        """Refuses a checkpoint that is not of this run's model and held weights."""
        here = {name: _kind(x) for name, x in leaves.items() if name not in held}
        faults = _mismatches(meta["leaves"], here, "saved", "in this run")
        faults += _mismatches(meta["held"], dict(held), "then held", "now held")
        if faults:
            more = f" … and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise ValueError(
                f"the checkpoint of commit {step} in {self.folder} is of another model "
                "or run: " + "; ".join(faults[:8]) + more
            )

    def _hashes(self, objective: Objective[Any, Any]) -> dict[str, str]:
        """Content hashes of the leaves that the objective holds and supplies."""
        if self._held is None:
            self._held = held_hashes(objective)
        return self._held


def held_hashes(objective: Objective[Any, Any]) -> dict[str, str]:
    """SHA-256 of each leaf that comes from `held_variables` and never moves.

    Keys are the leaves' names in a checkpoint. The leaf is hashed as the run uses it:
    after `init`, which may have cast or moved it.
    """
    supplied = objective.held_variables()
    if supplied is None:
        return {}
    given = set(flatten(supplied))
    shapes = jax.eval_shape(objective.initializer, jax.random.key(0))
    fixed = [
        path
        for path in flatten(shapes)
        if path[0] in objective.held and given & {path, ("params", *path[1:])}
    ]
    if not fixed:
        return {}
    whole = flatten(objective.init(jax.random.key(0), supplied))
    return {f"variables/{slashed(path)}": _sha256(whole[path]) for path in fixed}


def _sha256(leaf: Any) -> str:
    array = np.ascontiguousarray(np.asarray(leaf))
    digest = hashlib.sha256(_kind(array).encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _leaves(state: TrainState) -> dict[str, Any]:
    """Every array of a state by name; keys as the numbers they are made of."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _plain(leaf)
        for path, leaf in flat
    }


def _with_leaves(state: TrainState, leaves: Mapping[str, Any]) -> TrainState:
    def put(path: Any, old: Any) -> Any:
        new = leaves[jax.tree_util.keystr(path, simple=True, separator="/")]
        return jax.random.wrap_key_data(new) if _is_key(old) else new

    return jax.tree_util.tree_map_with_path(put, state)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _kind(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _shape(kind: str, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """Reads what `_kind` wrote."""
    dtype, _, sizes = kind.removesuffix("]").partition("[")
    shape = tuple(int(size) for size in sizes.split(",") if size)
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)


def _mismatches(
    then: Mapping[str, str], now: Mapping[str, str], was: str, is_: str
) -> list[str]:
    return [
        f"{name}: {was} {then.get(name, 'nothing')}, {is_} {now.get(name, 'nothing')}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
