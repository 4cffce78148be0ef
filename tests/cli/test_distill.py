"""Prune, cache, distill, check: the commands, on tiny real folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dew import api as roads
from dew.cli import main
from dew.converters.load import load_native
from dew.converters.surgery.prune_depth import prune_layers, spread_layers
from dew.tree import flatten
from tests.support import hf_models as hf
from tests.support.tolerances import CUT, RTOL

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill") / "teacher"
    return hf.save(hf.llama(num_hidden_layers=3), folder)


@pytest.fixture(scope="module")
def student(teacher: Path) -> Path:
    folder = teacher.parent / "student"
    return prune_layers(load_native(teacher), (0, 2), folder)


@pytest.fixture(scope="module")
def text(teacher: Path) -> Path:
    draw = np.random.default_rng(0)
    folder = teacher.parent / "text"
    folder.mkdir()
    for i in range(6):
        words = " ".join(f"w{n}" for n in draw.integers(6, 96, 60))
        (folder / f"{i}.txt").write_text(words)
    return folder


def dew(capsys: Any, *words: Any) -> tuple[int, Any]:
    """A command's exit code, and its JSON object or what it complained of."""
    code = main([*map(str, words), "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


def test_a_cut_model_is_the_teacher_without_the_other_blocks(
    teacher: Path, student: Path
) -> None:
    whole, cut = load_native(teacher), load_native(student)
    assert cut.config["num_hidden_layers"] == 2
    kept = {"0": "0", "1": "2"}
    theirs = flatten(whole.variables)
    for path, leaf in flatten(cut.variables).items():
        is_block = path[1] == "layers"
        old = (*path[:2], kept[path[2]], *path[3:]) if is_block else path
        np.testing.assert_array_equal(leaf, theirs[old])
    ids = hf.tokens()
    want = hf.torch_logits(hf.reloaded(student), ids)
    assert hf.largest_difference(cut.logits(ids), want) < CUT


@pytest.mark.parametrize(
    ("count", "kept", "want"),
    [(30, 6, (0, 6, 12, 17, 23, 29)), (3, 3, (0, 1, 2)), (5, 1, (4,))],
)
def test_spread_blocks_keep_the_first_and_the_last(
    count: int, kept: int, want: Any
) -> None:
    assert spread_layers(count, kept) == want


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((0, 3), "3 is no block of 0 to 2"),
        ((), "at least one block must be kept"),
        ((1, 1), "a block is named twice"),
    ],
)
def test_blocks_that_cannot_be_kept_are_refused(
    teacher: Path, tmp_path: Path, layers: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prune_layers(load_native(teacher), layers, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


RUN = "--steps 2 --batch-size 8 --seq-len 12 --learning-rate 1e-3 --log-every 1".split()


def test_distilling_moves_the_student_alone_and_exports_it(
    teacher: Path, student: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    code, result = dew(
        capsys,
        *("distill", "--teacher", teacher, "--teacher-road", "native"),
        *("--student", student, "--data", text, "--eval-data", text / "0.txt"),
        *("--out", tmp_path / "run", "--terms", "kl", "ce=0.5", "hidden=0.1", *RUN),
    )
    assert code == 0, result
    assert len(result["losses"]) == 2
    assert {"forward_kl", "cross_entropy", "hidden_1"} <= set(result["terms"])
    assert result["teacher_perplexity"] > 1
    assert result["eval"]["after"]["tokens"] == result["eval"]["before"]["tokens"]
    assert result["certificate"]["passed"]
    exported = flatten(load_native(tmp_path / "run" / "export").variables)
    before = flatten(load_native(student).variables)
    assert set(exported) == set(before)
    assert not all(np.array_equal(exported[path], before[path]) for path in before)
    again = roads.trained(tmp_path / "run", ema=False)
    for path, leaf in flatten(again.variables).items():
        np.testing.assert_array_equal(leaf, exported[path])


def test_a_cache_is_written_once_and_taught_from(
    teacher: Path, student: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ("--data", text, "--out", tmp_path / "cache", "--seq-len", 12)
    cache = ("cache-teacher", "--teacher", teacher, *words, "--top-k", 16)
    code, result = dew(capsys, *cache)
    assert code == 0, result
    assert result["tokens"] == 6 * (60 + 1)
    assert result["bytes_per_token"] <= 120
    assert result["manifest"]["is_complete"]
    assert dew(capsys, *cache)[1] == result
    code, result = dew(
        capsys,
        *("distill", "--student", student, "--teacher-road", "cache"),
        *("--cache", tmp_path / "cache", "--out", tmp_path / "run", *RUN),
        *("--terms", "kl", "student_loss=0.5"),
    )
    assert code == 0, result
    assert result["certificate"]["passed"]
    terms = {name: np.asarray(values) for name, values in result["terms"].items()}
    own = terms["student_loss"]
    np.testing.assert_allclose(own, terms["watch/cross_entropy"], rtol=RTOL["float32"])
    np.testing.assert_allclose(
        result["losses"], terms["forward_kl"] + own / 2, rtol=RTOL["float32"]
    )
    other = [*cache[:-1], 8]
    code, complaint = dew(capsys, *other)
    assert code == 2
    assert "k was 16 and is 8" in complaint


@pytest.mark.full
def test_captured_scores_become_a_cache_to_learn_from(
    teacher: Path, student: Path, tmp_path: Path, capsys: Any
) -> None:
    draw = np.random.default_rng(0)
    values = np.sort(draw.dirichlet(np.ones(12), (40, 11))[..., :8])[..., ::-1]
    table = {
        "input_ids": draw.integers(0, hf.VOCAB, (40, 12)).tolist(),
        "token_ids": draw.permuted(np.tile(np.arange(hf.VOCAB), (40, 11, 1)), axis=2)[
            ..., :8
        ].tolist(),
        "top_values": np.log(values).tolist(),
    }
    pq.write_table(pa.table(table), tmp_path / "captured.parquet")
    words = ("--captured", tmp_path / "captured.parquet", "--out", tmp_path / "cache")
    code, result = dew(
        capsys, "cache-teacher", "--teacher", teacher, *words, "--seq-len", 12
    )
    assert code == 0, result
    assert result["tokens"] == 40 * 12
    code, result = dew(
        capsys,
        *("distill", "--student", student, "--teacher-road", "cache"),
        *("--cache", tmp_path / "cache", "--out", tmp_path / "run", *RUN),
    )
    assert code == 0, result
    assert np.isfinite(result["terms"]["forward_kl"]).all()


@pytest.mark.full
def test_on_policy_rows_and_moving_weights_reach_the_objective(
    teacher: Path, student: Path, text: Path, tmp_path: Path, capsys: Any
) -> None:
    code, result = dew(
        capsys,
        *("distill", "--teacher", teacher, "--teacher-road", "lowered"),
        *("--student", student, "--data", text, "--out", tmp_path / "run"),
        *("--terms", "kl=linear:1.0->0.0@1", "hidden=0.1", "--on-policy", 1.0, *RUN),
    )
    assert code == 0, result
    terms = result["terms"]
    assert terms["on_policy/rows"] == [1.0, 1.0]
    assert max(terms["on_policy/new_tokens"]) <= 6
    # At the second step the weight of the KL has fallen to nothing.
    np.testing.assert_allclose(
        result["losses"][1], 0.1 * terms["hidden_1"][1], rtol=RTOL["float32"]
    )
    log = (tmp_path / "run" / "logs" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in log for name in json.loads(line)}
    assert {"train/student_perplexity", "train/teacher_perplexity"} <= names


@pytest.mark.full
def test_the_check_passes_a_right_pair(
    teacher: Path, student: Path, text: Path, capsys: Any
) -> None:
    code, result = dew(
        capsys,
        *("check", "--teacher", teacher, "--student", student, "--data", text),
        *("--seq-len", 12, "--terms", "kl", "ce=0.5", "hidden=0.1"),
    )
    assert code == 0, result
    assert {"name", "expected", "found", "passed"} == set(result["rows"][0])
    assert any("states of a student" in row["name"] for row in result["rows"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--terms", "k"), "'k' is none of kl"),
        (("--teacher-road", "cache"), "--cache goes with --teacher-road cache"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    teacher: Path, student: Path, text: Path, words: Any, message: str, capsys: Any
) -> None:
    given = {
        "--teacher": teacher,
        "--teacher-road": "native",
        "--student": student,
        "--data": text,
        "--out": teacher.parent / "never",
    } | {words[0]: words[1]}
    flat = [str(word) for pair in given.items() for word in pair]
    code, complaint = dew(capsys, "distill", *flat)
    assert code == 2
    assert message in complaint


@pytest.mark.full
@pytest.mark.parametrize("road", ["live", "lowered"])
def test_torch_teachers_give_the_native_ones_losses(
    teacher: Path, student: Path, text: Path, tmp_path: Path, capsys: Any, road: str
) -> None:
    def losses(road: str) -> Any:
        code, result = dew(
            capsys,
            *("distill", "--teacher", teacher, "--teacher-road", road),
            *("--student", student, "--data", text, "--out", tmp_path / road),
            *("--top-k", 96, *RUN),
        )
        assert code == 0, result
        return result["losses"]

    np.testing.assert_allclose(losses(road), losses("native"), rtol=RTOL["reordered"])
