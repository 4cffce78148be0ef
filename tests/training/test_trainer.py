"""The loop: what it counts, what it shows, what it refuses."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dew.training.checkpoint import Checkpoints, Keep
from dew.training.logs import TrainingError
from dew.training.sharding import make_mesh
from dew.training.trackers import JSONL
from tests.support.runs import Losses, Rows, held_out, trainer
from tests.support.tolerances import RTOL


def losses_of(steps: int = 4, data: Any = None, **settings: Any) -> list[float]:
    seen = Losses()
    trainer(callbacks=[seen], **settings).fit(data or Rows(), steps=steps, log_every=1)
    return seen.losses


@pytest.fixture(scope="module")
def trace() -> list[float]:
    """Losses of six uninterrupted commits."""
    return losses_of(6)


def test_the_same_run_twice_gives_bit_equal_losses(trace: list[float]) -> None:
    assert losses_of(6) == trace


def test_another_key_gives_other_losses(trace: list[float]) -> None:
    assert losses_of(2, key=jax.random.key(1)) != trace[:2]


def test_logging_seldom_reports_every_commit_all_the_same(trace: list[float]) -> None:
    seen = Losses()
    trainer(callbacks=[seen]).fit(Rows(), steps=6, log_every=4)
    assert (seen.losses, [log.step for log in seen.logs]) == (trace, [1, 4, 6])


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2},
        pytest.param({"fsdp": 4}, marks=pytest.mark.full),
        pytest.param({"data": 8, "fsdp": 1}, marks=pytest.mark.full),
    ],
)
def test_losses_do_not_depend_on_the_number_of_devices(
    trace: list[float], axes: dict[str, int]
) -> None:
    devices = jax.devices()[: axes.get("data", 1) * axes["fsdp"]]
    split = losses_of(2, mesh=make_mesh(**axes, devices=devices))
    # The largest difference seen is 8.3e-8.
    np.testing.assert_allclose(split, trace[:2], rtol=RTOL["float32"])


def test_a_resumed_run_goes_on_with_bit_equal_losses(
    trace: list[float], tmp_path: Path
) -> None:
    first = losses_of(3, checkpoints=Checkpoints(tmp_path, every=2))
    seen = Losses()
    again = trainer(callbacks=[seen], checkpoints=Checkpoints(tmp_path, every=2))
    again.fit(Rows(), steps=6, log_every=1, resume=True)
    assert first + seen.losses == trace


def test_checkpoints_are_kept_by_rule(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, every=1, keep=Keep(last=1, period=2))
    losses_of(5, checkpoints=kept)
    assert kept.steps() == [2, 4, 5]


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, every=1, keep=Keep(best="held_out/perplexity"))
    seen = Losses()
    trainer(callbacks=[seen], checkpoints=kept).fit(
        Rows(), steps=3, evaluations=held_out(), eval_every=1
    )
    scores = {step: m["held_out/perplexity"] for step, m in seen.evaluations.items()}
    assert kept.best() == min(scores, key=lambda step: scores[step])


def test_evaluation_is_token_weighted_over_the_whole_set() -> None:
    seen = Losses()
    trainer(callbacks=[seen]).fit(
        Rows(), steps=1, evaluations=held_out(2), eval_on_start=True
    )
    first = seen.evaluations[0]
    assert first["held_out/tokens"] == 2 * 8 * 11
    assert first["held_out/perplexity"] == pytest.approx(
        np.exp(first["held_out/nats_per_token"]), rel=RTOL["float64"]
    )


def test_the_step_is_compiled_once() -> None:
    compiled = []

    def count(event: str, duration_secs: float, **tags: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(tags.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        losses_of(3)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled.count("jit(attempt)") == 1


def test_the_state_is_donated() -> None:
    alive: list[int] = []

    class Counting(Rows):
        """Counts the arrays of a table's shape each time a batch is asked for."""

        def __next__(self) -> dict[str, Any]:
            alive.append(sum(x.shape == (11, 8) for x in jax.live_arrays()))
            return super().__next__()

    run = trainer(accumulation=1, ema=False)
    state = run.fit(Counting(), steps=4, log_every=4)
    one_state = sum(leaf.shape == (11, 8) for leaf in jax.tree.leaves(state))
    # The first call comes before the state is built; a step that copied would leave
    # two states at the later ones.
    assert [count - alive[0] for count in alive[1:]] == [one_state] * 3


def test_data_that_ends_early_saves_and_says_where(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, every=50)
    with pytest.raises(TrainingError, match="ended after 2 of 9 commits; a checkpoint"):
        losses_of(9, Rows(end=5), checkpoints=kept)
    assert kept.latest() == 2


def test_empty_data_is_refused() -> None:
    with pytest.raises(TrainingError, match="yielded no batch"):
        losses_of(1, Rows(end=0))


def test_a_batch_of_another_shape_is_refused() -> None:
    data = iter([*(next(Rows()) for _ in range(2)), next(Rows(rows=4))] * 2)
    with pytest.raises(
        ValueError, match=r"tokens was int32\[8, 12\], is int32\[4, 12\]"
    ):
        losses_of(4, data)


def test_a_batch_without_what_the_objective_reads_is_refused() -> None:
    data = iter([{"ids": np.zeros((8, 12), np.int32)}])
    with pytest.raises(ValueError, match=r"lacks tokens.*it has ids"):
        losses_of(1, data)


def test_rows_that_the_mesh_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 8.*tokens has 6 rows"):
        losses_of(1, Rows(rows=6), mesh=make_mesh())


def test_a_used_folder_is_refused_without_resume(tmp_path: Path) -> None:
    losses_of(1, checkpoints=Checkpoints(tmp_path, every=1))
    with pytest.raises(ValueError, match="already holds commit 1: pass"):
        losses_of(1, checkpoints=Checkpoints(tmp_path, every=1))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    losses_of(1, checkpoints=Checkpoints(tmp_path, every=1))
    other = trainer(ema=False, checkpoints=Checkpoints(tmp_path, every=1))
    with pytest.raises(ValueError, match="is of another model or run: ema/"):
        other.fit(Rows(), steps=2, resume=True)


def test_data_without_a_position_is_refused_beside_checkpoints(tmp_path: Path) -> None:
    data = iter([next(Rows())])
    with pytest.raises(TypeError, match=r"get_state.*which list_iterator lacks"):
        losses_of(1, data, checkpoints=Checkpoints(tmp_path, every=1))


def test_steps_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        losses_of(0)


def test_a_tracker_that_throws_is_named_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    run = trainer(tracker=JSONL(blocked / "metrics.jsonl"))
    assert int(run.fit(Rows(), steps=1).commits) == 1
    assert "jsonl" in capsys.readouterr().err


def test_non_finite_microbatches_stop_the_run_and_are_named() -> None:
    drawn = trainer().objective.init(jax.random.key(0))
    broken = jax.tree.map(lambda leaf: leaf * np.nan, drawn)
    run = trainer(variables=broken, max_rejections=3)
    rule = r"after commit 0: 3 microbatches in a row.*statistics/total.*gradient of"
    with pytest.raises(TrainingError, match=rule):
        run.fit(Rows(), steps=2)


def test_fully_masked_data_stops_the_run() -> None:
    batch = {**next(Rows()), "mask": np.zeros((8, 12), bool)}
    with pytest.raises(
        TrainingError, match=r"100 windows in a row.*Are all targets masked"
    ):
        losses_of(2, iter([batch] * 400))


def test_fsdp_leaves_no_whole_copy_of_a_large_leaf() -> None:
    state = trainer(mesh=make_mesh(fsdp=8), accumulation=1).fit(Rows(), steps=1)
    q = state.variables["params"]["layers"]["0"]["attn"]["q"]["weight"]
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.shape == q.shape]
    assert len(moments) >= 2
    for leaf in (q, *moments):
        assert {shard.data.size for shard in leaf.addressable_shards} == {q.size // 8}


def test_losses_are_the_same_when_layers_are_split_as_well(trace: list[float]) -> None:
    split = losses_of(2, mesh=make_mesh(data=2, fsdp=2, tensor=2))
    np.testing.assert_allclose(split, trace[:2], rtol=RTOL["float32"])


def test_a_preview_reuses_the_scores_of_the_first_batch() -> None:
    told = []

    class Shown(Losses):
        def on_preview(self, step: int, name: str, preview: Any) -> None:
            told.append((step, name, preview.losses.shape))

    run = trainer(callbacks=[Shown()], ema=False)
    run.fit(Rows(), steps=1, evaluations=held_out(2))
    assert told == [(1, "held_out", (8, 12))]


def test_the_profiler_leaves_a_trace(tmp_path: Path, trace: list[float]) -> None:
    seen = Losses()
    trainer(callbacks=[seen]).fit(Rows(), steps=3, profile=tmp_path)
    assert seen.losses == trace[:3]
    assert list(tmp_path.rglob("*.xplane.pb"))


FULL_DISK = """
import resource, sys
from tests.support.runs import Checkpoints, Rows, trainer
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
run = trainer(checkpoints=Checkpoints(sys.argv[1], every=1), accumulation=1)
try:
    run.fit(Rows(), steps=2)
except OSError as fault:
    print(fault)
"""


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = f"a checkpoint could not be written to {tmp_path / 'run'}"
    assert said in done.stdout, done.stderr
    assert "the last complete one is of commit None" in done.stdout
    kept = Checkpoints(tmp_path / "run")
    assert kept.latest() is None
