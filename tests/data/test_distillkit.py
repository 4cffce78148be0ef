"""DistillKit's parquet layout, built by hand with pyarrow, and read back."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dew.data.distillkit import Compression, ResidualBin, captured_texts, packed_rows
from dew.losses.divergences import ForwardKL
from dew.losses.sparse_scores import TopKScores
from dew.losses.term import TermInputs
from tests.losses import reference as ref
from tests.support.tolerances import RTOL

VOCAB, K, WIDTH = ref.VOCAB, 12, 6


def bits(number: int, width: int) -> str:
    return format(number, f"0{width}b")


def packed(numbers: Any, width: int) -> list[int]:
    """Bit by bit as the layout says, on strings."""
    text = "".join(bits(int(n), width) for n in numbers)
    text += "0" * (-len(text) % 8)
    return [int(text[i : i + 8], 2) for i in range(0, len(text), 8)]


def said(seq: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The k likeliest of a teacher's log-probabilities, falling."""
    logits = 2 * np.random.default_rng(seed).normal(size=(seq, VOCAB))
    log_probs = ref.log_softmax(logits)
    ids = np.argsort(-log_probs, axis=1)[:, :K]
    return ids, np.take_along_axis(log_probs, ids, axis=1)


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    schema = pa.schema(
        [
            pa.field("input_ids", pa.list_(pa.uint64())),
            pa.field("compressed_logprobs", pa.list_(pa.list_(pa.uint8()))),
            pa.field("bytepacked_indices", pa.list_(pa.list_(pa.uint8()))),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
    return file


def test_log_probs_kept_as_numbers_come_back_with_their_tokens(tmp_path: Path) -> None:
    ids, values = said(4)
    kept = values.astype(np.float32)
    row = {
        "input_ids": [5, 6, 7, 8, 9],
        "compressed_logprobs": [list(one.tobytes()) for one in kept],
        "bytepacked_indices": [packed(one, WIDTH) for one in ids],
    }
    how = Compression(d=VOCAB, k=K, exact_k=K, delta_encoding=False)
    (text,) = captured_texts([write(tmp_path / "a.parquet", [row])], how)
    np.testing.assert_array_equal(text.ids[:4], ids)
    np.testing.assert_array_equal(text.log_probs[:4], kept)
    tail = np.log1p(-np.exp(kept.astype(np.float64)).sum(1))
    np.testing.assert_allclose(text.tail[:4], tail, rtol=RTOL["float64"])
    # The last token predicts no other.
    assert np.isneginf(text.log_probs[4]).all()


@pytest.mark.parametrize("delta", [False, True])
def test_polynomials_and_residuals_are_added_up(delta: bool) -> None:
    """Two exact values in bfloat16, three terms, and bins of 3 bits and of 1."""
    exact = np.asarray([-0.5, -1.25], ml_dtypes.bfloat16)
    terms = np.asarray([-2.0, -0.125, -0.25], "<f4")
    scales = np.asarray([0.0625], "<f2"), np.asarray([0.5], "<f4")
    raw = [*exact.tobytes(), *terms.tobytes()]
    raw += [*scales[0].tobytes(), *packed([0, 4, 7, 5, 3], 3)]
    raw += [*scales[1].tobytes(), *packed([1, 0, 1], 1)]
    how = Compression(
        d=VOCAB,
        k=K,
        exact_k=2,
        exact_dtype="bfloat16",
        polynomial_terms=(0, 1, "sqrt"),
        residual_bins=(
            ResidualBin(scale_dtype="float16", element_bits=3, num_elements=5),
            ResidualBin(scale_dtype="float32", element_bits=1, num_elements=3),
        ),
        delta_encoding=delta,
    )
    want = [-0.5, -1.25]
    residuals = [0.0625 * r for r in (-4, 0, 3, 1, -1)] + [0.5, -0.5, 0.5, 0, 0]
    for t, residual in enumerate(residuals):
        want.append(-2.0 - 0.125 * t - 0.25 * math.sqrt(t) + residual)
    found = how.log_probs(np.asarray([raw], np.uint8))[0]
    total = np.cumsum(want) if delta else want
    np.testing.assert_allclose(found, total, rtol=RTOL["float64"])


def test_the_config_is_the_one_that_lies_beside_the_files(tmp_path: Path) -> None:
    file = tmp_path / "compression_config.yaml"
    file.write_text(
        "d: 151936\nk: 50\nexact_k: 1\nexact_dtype: bfloat16\n"
        "polynomial_terms: [0, 1, sqrt]\nterm_dtype: float32\nresidual_bins: []\n"
        "delta_encoding: false\nerror_diffusion: false\nnormalize_t: false\n"
    )
    how = Compression.read(file)
    assert how.polynomial_terms == (0, 1, "sqrt")
    # 18 bits for each of 50 tokens; the project's README says around 114 with the rest.
    assert math.ceil(how.id_bits * how.k / 8) + 2 + 3 * 4 == 127
    file.write_text("d: 3\nk: 1\nexact_k: 1\nmagic: 7\n")
    with pytest.raises(ValueError, match=r"not known: \['magic'\]"):
        Compression.read(file)


def test_the_loss_from_captured_scores_is_that_of_the_bucketed_teacher(
    tmp_path: Path,
) -> None:
    teacher = 2 * np.random.default_rng(3).normal(size=(6, VOCAB))
    log_probs = ref.log_softmax(teacher)
    ids = np.argsort(-log_probs, axis=1)[:, :K]
    values = np.take_along_axis(log_probs, ids, axis=1)
    row = {
        "input_ids": list(range(7)),
        "compressed_logprobs": [list(v.astype("<f8").tobytes()) for v in values],
        "bytepacked_indices": [packed(one, WIDTH) for one in ids],
    }
    how = Compression(
        d=VOCAB, k=K, exact_k=K, exact_dtype="float64", delta_encoding=False
    )
    rows = list(packed_rows(captured_texts([write(tmp_path / "a", [row])], how), 8))
    np.testing.assert_array_equal(rows[0]["segment_ids"], [[1] * 7 + [0]])
    ids, kept, tail = (
        jnp.asarray(rows[0][f"teacher_{n}"]) for n in ("ids", "log_probs", "tail")
    )
    student = 2 * np.random.default_rng(4).normal(size=(1, 8, VOCAB))
    got = ForwardKL().values(
        TermInputs(jnp.asarray(student, jnp.float32), TopKScores(ids, kept, tail))
    )[0, :6]
    want = ref.tail_kl(teacher, student[0, :6], K)
    np.testing.assert_allclose(got, want, rtol=RTOL["float32"])


def test_texts_fill_rows_end_to_end(tmp_path: Path) -> None:
    ids, values = said(5)
    plain = {
        "input_ids": [[1, 2, 3, 4, 5], [6, 7, 8]],
        "token_ids": [ids.tolist(), ids[:3].tolist()],
        "top_values": [(values + 7).tolist(), (values[:3] + 7).tolist()],
    }
    pq.write_table(pa.table(plain), tmp_path / "plain.parquet")
    texts = captured_texts([tmp_path / "plain.parquet"], None, is_logits=True)
    rows = list(packed_rows(texts, 4))
    np.testing.assert_array_equal(
        [r["tokens"][0] for r in rows], [[1, 2, 3, 4], [5, 6, 7, 8]]
    )
    np.testing.assert_array_equal(
        [r["segment_ids"][0] for r in rows], [[1, 1, 1, 1], [1, 2, 2, 2]]
    )
    # Of logits the kept are all there is.
    mass = np.exp(rows[0]["teacher_log_probs"]).sum(-1)
    np.testing.assert_allclose(mass, 1, rtol=RTOL["float32"])
    assert np.isneginf(rows[0]["teacher_tail"]).all()


def test_a_file_of_another_layout_or_another_compression_is_refused(
    tmp_path: Path,
) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    how = Compression(d=VOCAB, k=K, exact_k=K)
    with pytest.raises(ValueError, match=r"must have the columns .* it has text"):
        list(captured_texts([tmp_path / "text.parquet"], how))
    with pytest.raises(ValueError, match="need 9 bytes a token, the file has 2"):
        how.ids(np.zeros((1, 2), np.uint8))
