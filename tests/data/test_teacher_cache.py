"""The cache of a teacher: its size, its round trip, resuming, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.data.teacher_cache import (
    Binding,
    CachedBatches,
    CacheWriter,
    Manifest,
    TeacherCache,
)
from dew.losses.divergences import ForwardKL
from dew.losses.scores import DenseScores
from dew.losses.sparse_scores import TopKScores
from dew.losses.term import TermInputs
from dew.objectives.distillation.teachers import scores_of
from tests.support.tolerances import RTOL

VOCAB, SEQ = 40, 6
BINDING = Binding(
    teacher="t" * 64,
    tokenizer="k" * 64,
    order={"seed": 0, "documents": [3]},
    seq_len=SEQ,
    vocab=VOCAB,
    k=VOCAB,
    precision="float32",
)


def rows(count: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of two documents each and a little padding, the last row all of it."""
    draw = np.random.default_rng(seed)
    segments = np.tile(np.asarray([1, 1, 2, 2, 2, 0], np.int32), (count, 1))
    segments[-1] = 0
    tokens = draw.integers(0, VOCAB, (count, SEQ)).astype(np.int32)
    return {"tokens": tokens, "segment_ids": segments}


def logits(seed: int = 0, count: int = 4) -> Any:
    return 2 * jax.random.normal(jax.random.key(seed), (count, SEQ, VOCAB))


def write(folder: Path, binding: Binding, batches: int = 3, **options: Any) -> None:
    writer = CacheWriter(folder=folder, binding=binding, **options)
    start = dict(writer.position or {"at": 0})["at"]
    for at in range(start, batches):
        key = jax.random.key(at)
        stored = scores_of(
            logits(at),
            policy=binding.policy,
            k=binding.k,
            key=key,
            temperature=binding.temperature,
        )
        arrays = {name: np.asarray(leaf) for name, leaf in stored.items()}
        writer.add({**rows(seed=at), **arrays}, {"at": at + 1})
    writer.close({"at": batches})


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path, BINDING, shard_rows=4)
    cache = TeacherCache(tmp_path)
    # Three batches of four rows, of which each one's last is padding and is left out.
    assert len(cache) == 9
    assert cache.manifest.tokens == 9 * 5
    for at in (0, 4, 8):
        batch, i = rows(seed=at // 3), at % 3
        want = scores_of(logits(at // 3), policy="top_k", k=VOCAB, key=None)
        got = cache[at]
        np.testing.assert_array_equal(got["tokens"], batch["tokens"][i])
        np.testing.assert_array_equal(got["positions"], [0, 1, 0, 1, 2, 0])
        for name, leaf in want.items():
            np.testing.assert_array_equal(got[name], leaf[i], err_msg=name)


@pytest.mark.parametrize(("precision", "atol"), [("float32", 0), ("float16", 2e-3)])
def test_at_k_of_all_classes_a_cache_gives_the_live_loss(
    tmp_path: Path, precision: Any, atol: float
) -> None:
    binding = replace(BINDING, temperature=2.0, precision=precision)
    write(tmp_path, binding, batches=1)
    cache = TeacherCache(tmp_path)
    got = [cache[i] for i in range(len(cache))]
    arrays = [
        jnp.asarray(np.stack([row[f"teacher_{name}"] for row in got]))
        for name in ("ids", "log_probs", "tail")
    ]
    student, term = logits(9)[:3], ForwardKL(temperature=2.0)
    want = term.values(TermInputs(student, DenseScores(logits(0)[:3])))
    found = term.values(TermInputs(student, TopKScores(*arrays, temperature=2.0)))
    np.testing.assert_allclose(found, want, rtol=RTOL["float32"], atol=atol)


@pytest.mark.parametrize(("vocab", "most"), [(49152, 70), (151936, 104)])
def test_sixteen_classes_take_at_most_a_hundred_and_twenty_bytes(
    vocab: int, most: int
) -> None:
    binding = replace(BINDING, vocab=vocab, k=16, seq_len=1024, precision="float16")
    assert binding.bytes_per_token == most <= 120


def test_drawn_tokens_are_kept_with_their_weights(tmp_path: Path) -> None:
    write(tmp_path, replace(BINDING, policy="sampled", k=5), batches=1)
    row = TeacherCache(tmp_path)[0]
    assert "teacher_log_probs" not in row
    np.testing.assert_allclose(row["teacher_weights"].sum(-1), 1, rtol=RTOL["float32"])


def test_a_stopped_writer_goes_on_and_gives_the_same_files(tmp_path: Path) -> None:
    write(tmp_path / "once", BINDING, shard_rows=3)
    writer = CacheWriter(folder=tmp_path / "twice", binding=BINDING, shard_rows=3)
    stored = scores_of(logits(0), policy="top_k", k=VOCAB, key=None)
    arrays = {name: np.asarray(leaf) for name, leaf in stored.items()}
    writer.add({**rows(seed=0), **arrays}, {"at": 1})
    with pytest.raises(ValueError, match="is not complete"):
        TeacherCache(tmp_path / "twice")
    write(tmp_path / "twice", BINDING, shard_rows=3)
    once, twice = (Manifest.read(tmp_path / name) for name in ("once", "twice"))
    assert once == twice


def test_batches_resume_where_they_stood(tmp_path: Path) -> None:
    write(tmp_path, BINDING)
    cache = TeacherCache(tmp_path)
    batches = CachedBatches(cache, batch_size=2, seed=1)
    seen = [next(batches) for _ in range(3)]
    position = batches.get_state()
    want = [next(batches) for _ in range(4)]
    again = CachedBatches(cache, batch_size=2, seed=1)
    again.set_state(position)
    for one in want:
        got = next(again)
        assert all(np.array_equal(got[name], one[name]) for name in one)
    assert not np.array_equal(seen[0]["tokens"], seen[1]["tokens"])
    with pytest.raises(ValueError, match="resume with what the run was started with"):
        CachedBatches(cache, batch_size=2, seed=2).set_state(position)


def test_processes_share_out_the_rows_of_a_batch(tmp_path: Path) -> None:
    write(tmp_path, BINDING)
    cache = TeacherCache(tmp_path)
    whole = next(CachedBatches(cache, batch_size=4, seed=0))["tokens"]
    parts = [
        next(CachedBatches(cache, batch_size=4, seed=0, shard=(i, 2)))["tokens"]
        for i in range(2)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    write(tmp_path, BINDING)
    shard = tmp_path / Manifest.read(tmp_path).shards[0].name
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows-00000.bin is damaged"):
        TeacherCache(tmp_path)
    shard.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="bytes, not"):
        TeacherCache(tmp_path)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("teacher", "u" * 64),
        ("tokenizer", "l" * 64),
        ("order", {"seed": 1, "documents": [3]}),
        ("k", 8),
        ("temperature", 2.0),
        ("policy", "sampled"),
    ],
)
def test_any_mismatch_is_refused_by_name(
    tmp_path: Path, field: str, other: Any
) -> None:
    write(tmp_path, BINDING, batches=1)
    with pytest.raises(ValueError, match=f"something else: {field} was"):
        CacheWriter(folder=tmp_path, binding=replace(BINDING, **{field: other}))
    with pytest.raises(ValueError, match=f"not of this run: {field} must be"):
        TeacherCache(tmp_path).require(**{field: other})
    TeacherCache(tmp_path).require(**{field: getattr(BINDING, field)})


def test_a_folder_with_anything_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no teacher cache"):
        CacheWriter(folder=tmp_path, binding=BINDING)
