"""The live teacher: what it hands over, and that its thread behaves."""

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dew.bridges import LiveTeacher
from dew.bridges.teachers.batches import live_batches
from dew.losses.scores import DenseScores
from dew.losses.sparse_scores import top_k
from dew.objectives.base import Step
from tests.support import hf_models as hf
from tests.support.tolerances import RTOL


@pytest.fixture(scope="module")
def llama() -> Any:
    return hf.llama()


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    for seed in range(count):
        yield {"tokens": hf.tokens(2, 8, seed), "weights": np.ones((2, 8))}


def alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("teacher")]


def test_scores_are_torchs_own_logits_batch_by_batch(llama: Any) -> None:
    with LiveTeacher(module=llama).score_stream(batches(4)) as stream:
        found = list(stream)
    assert len(found) == 4
    for scored in found:
        want = hf.torch_logits(llama, scored["tokens"])
        np.testing.assert_array_equal(scored["teacher_logits"], want)
    assert alive() == []


def test_the_top_k_and_the_mass_of_the_rest_make_one(llama: Any) -> None:
    teacher = LiveTeacher(module=llama, top_k=5, temperature=2.0)
    batch = next(batches(1))
    top = teacher.score(batch)
    logits = hf.torch_logits(llama, batch["tokens"]).astype(np.float64) / 2
    want = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    kept = np.take_along_axis(want, np.asarray(top["teacher_ids"]), axis=-1)
    found = np.exp(top["teacher_log_probs"])
    np.testing.assert_allclose(found, kept, rtol=RTOL["float32"])
    mass = found.sum(-1) + np.exp(top["teacher_tail"])
    np.testing.assert_allclose(mass, 1, rtol=RTOL["float32"])


@pytest.mark.parametrize("k", [None, 5])
def test_an_objectives_teacher_reads_what_it_wrote(llama: Any, k: int | None) -> None:
    live = LiveTeacher(module=llama, top_k=k)
    batch = live.score(next(batches(1)))
    step = Step(step=jnp.zeros((), jnp.int32), key=jax.random.key(0), ema=None)
    scored = live.teacher.score({}, batch, step, layers=(), split=False)
    student = jnp.zeros((2, 8, hf.VOCAB))
    logits = jnp.asarray(hf.torch_logits(llama, batch["tokens"]))
    want: Any = DenseScores(logits) if k is None else top_k(logits, k, temperature=1.0)
    whole: Any = scored.scores
    np.testing.assert_allclose(
        whole.tokens.cross_entropy(student, 1.0),
        want.cross_entropy(student, 1.0),
        rtol=RTOL["float32"],
    )


def test_hidden_states_of_blocks_come_before_the_final_norm(llama: Any) -> None:
    batch = next(batches(1))
    live = LiveTeacher(module=llama, layers=(0, -1, 2))
    scored = live.teacher.score(
        {},
        live.score(batch),
        Step(step=jnp.int32(0), key=jax.random.key(0), ema=None),
        layers=(2, -1, 0),
        split=False,
    )
    hidden = scored.hidden[::-1]
    with torch.no_grad():
        out = llama(torch.tensor(batch["tokens"]), output_hidden_states=True)
        normed = llama.model.norm(torch.tensor(np.array(hidden[1])))
    np.testing.assert_array_equal(hidden[0], out.hidden_states[1])
    torch.testing.assert_close(normed, out.hidden_states[2])
    # The number of blocks means the states after the norm.
    np.testing.assert_array_equal(hidden[2], out.hidden_states[2])


def test_a_layer_that_a_live_teacher_lacks_is_refused(llama: Any) -> None:
    live = LiveTeacher(module=llama, layers=(3,))
    with pytest.raises(ValueError, match="names 3; this teacher has 2 blocks"):
        live.score(next(batches(1)))


def test_no_more_than_prefetch_batches_are_taken_ahead(llama: Any) -> None:
    taken = []

    def counted() -> Iterator[dict[str, np.ndarray]]:
        for number, batch in enumerate(batches(50)):
            taken.append(number)
            yield batch

    with LiveTeacher(module=llama, prefetch=2).score_stream(counted()) as stream:
        next(stream)
        time.sleep(0.3)
        assert len(taken) == 3
    assert alive() == []


def test_a_teacher_given_a_run_is_its_export(llama: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    hf.save(llama, run / "export")
    (run / "run.json").write_text("{}")
    from_run, from_export = (
        list(live_batches(folder, Stream(batches(1)), top_k=5, temperature=2.0))
        for folder in (run, run / "export")
    )
    assert len(from_run) == 1
    for name, array in from_export[0].items():
        np.testing.assert_array_equal(from_run[0][name], array)


class Stream(Iterator[dict[str, np.ndarray]]):
    """Batches with the position that a resumable stream has."""

    def __init__(self, source: Iterator[dict[str, np.ndarray]]) -> None:
        self._source = source
        self._count = 0

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._source)
        self._count += 1
        return batch

    def get_state(self) -> dict[str, object]:
        return {"count": self._count}

    def set_state(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


def test_an_error_surfaces_at_its_batch_and_ends_the_thread(llama: Any) -> None:
    good = next(batches(1))
    bad = {"tokens": np.full((2, 8), 10**6)}
    stream = LiveTeacher(module=llama).score_stream([good, bad, good])
    next(stream)
    with pytest.raises(RuntimeError, match="the teacher failed on batch 1: IndexError"):
        next(stream)
    assert alive() == []
    with pytest.raises(StopIteration):
        next(stream)


def test_leaving_early_ends_the_thread(llama: Any) -> None:
    with LiveTeacher(module=llama).score_stream(batches(1000)) as stream:
        next(stream)
    assert alive() == []


def test_it_runs_beside_a_compiled_step_without_a_deadlock(llama: Any) -> None:
    @jax.jit
    def step(weight: jax.Array, scores: jax.Array) -> jax.Array:
        return weight + jax.nn.log_softmax(scores @ weight).mean() * 1e-3

    weight = jnp.eye(hf.VOCAB)
    with LiveTeacher(module=llama).score_stream(batches(20)) as stream:
        for scored in stream:
            weight = step(weight, scored["teacher_logits"])
    assert np.isfinite(np.asarray(weight)).all()


# Torch announces the end of this module, which is still what users have.
@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_:UserWarning")
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_teachers_in_other_precisions_work(precision: str) -> None:
    full = hf.llama()
    if precision == "bfloat16":
        half: Any = hf.llama()
        teacher = LiveTeacher(module=half.to(torch.bfloat16))
    else:
        quantise = torch.ao.quantization.quantize_dynamic
        teacher = LiveTeacher(module=quantise(hf.llama(), {torch.nn.Linear}))
    batch = next(batches(1))
    scores = np.asarray(teacher.score(batch)["teacher_logits"], np.float32)
    want = hf.torch_logits(full, batch["tokens"])
    # Rounding to 8 bits and no more: another model differs by about 1.4.
    assert np.sqrt(((scores - want) ** 2).mean()) < 0.1 * want.std()


def test_impossible_settings_are_refused_together(llama: Any) -> None:
    with pytest.raises(
        ValueError, match=r"top_k must be.*prefetch must be.*temperature"
    ):
        LiveTeacher(module=llama, top_k=0, prefetch=0, temperature=0.0)
