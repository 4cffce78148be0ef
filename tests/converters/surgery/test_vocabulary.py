"""More tokens, and rows that are none: against transformers, and in a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import GPTJConfig, PreTrainedTokenizerFast

import dew
from dew.cli import main
from dew.objectives.base import Step, scalar_loss
from dew.objectives.causal_lm import CausalLM
from dew.tree import flatten, unflatten
from tests.converters.families.decoders import TINY
from tests.support import hf_models as hf
from tests.support.tolerances import FAMILY_GRADIENT, LOGITS, NEW_ROWS, RTOL

NEW = ("<tool>", "<call>", "<end of call>")
STEP = Step(jnp.int32(0), jax.random.key(0))


@pytest.fixture(scope="module", params=["apart", "tied", "biased"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Models whose head is a table of its own, the embedding, and one with a bias."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "biased":
        return hf.save(hf.build(GPTJConfig(**TINY["gptj"].fields)), folder)
    return hf.save(hf.llama(tie_word_embeddings=request.param == "tied"), folder)


@pytest.fixture(scope="module")
def grown(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("grown") / "out"
    return dew.extend_vocabulary(dew.load(model), NEW, out)


def test_new_rows_are_means_and_all_else_keeps_its_bytes(
    model: Path, grown: Path
) -> None:
    before, after = (load_file(f / "model.safetensors") for f in (model, grown))
    assert before.keys() == after.keys()
    for name, old in before.items():
        np.testing.assert_array_equal(after[name][: len(old)], old)
        if len(after[name]) > len(old):
            mean = old.astype(np.float64).mean(axis=0).astype(np.float32)
            want = np.broadcast_to(mean, (len(NEW), *mean.shape))
            np.testing.assert_array_equal(after[name][len(old) :], want)


def test_transformers_resizes_to_the_same_rows(model: Path, grown: Path) -> None:
    theirs: Any = hf.reloaded(model)
    theirs.resize_token_embeddings(hf.VOCAB + len(NEW), mean_resizing=True)
    ours: Any = hf.reloaded(grown)
    for table in ("get_input_embeddings", "get_output_embeddings"):
        got, want = (
            getattr(m, table)().weight.detach().numpy() for m in (ours, theirs)
        )
        # Torch draws around the mean with a variance of 1e-9 of the rows' own.
        np.testing.assert_allclose(got, want, atol=NEW_ROWS * np.abs(want).max())


def test_the_grown_folder_says_in_torch_what_it_says_here(grown: Path) -> None:
    theirs = hf.reloaded(grown)
    assert theirs.config.vocab_size == hf.VOCAB + len(NEW)
    ids = np.concatenate([hf.tokens(1, 12), [[97, 98, 99]]], axis=1)
    got = hf.logits_op_by_op(dew.load(grown), ids)
    assert got.shape[-1] == hf.VOCAB + len(NEW)
    assert hf.largest_difference(got, hf.torch_logits(theirs, ids)) <= LOGITS


def test_new_tokens_encode_to_the_new_ids_in_both(grown: Path) -> None:
    text = "w1 <tool>w2<end of call>"
    want = [1, 97, 2, 99]
    tokenizer = dew.load(grown).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode(text).ids == want
    assert PreTrainedTokenizerFast.from_pretrained(grown)(text).input_ids == want


def test_spare_rows_are_taken_first_and_listings_are_kept(tmp_path: Path) -> None:
    folder = hf.save(hf.llama(vocab_size=98), tmp_path / "base")
    listed = {"added_tokens_decoder": {"96": {"content": "<unk>", "special": True}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(listed))
    (folder / "added_tokens.json").write_text('{"<unk>": 96}')
    out = dew.extend_vocabulary(
        dew.load(folder), NEW[:1], tmp_path / "out", special=True
    )
    source = dew.load(out)
    assert source.config["vocab_size"] == 98
    old = load_file(folder / "model.safetensors")["lm_head.weight"]
    new = load_file(out / "model.safetensors")["lm_head.weight"]
    mean = old[:97].astype(np.float64).mean(axis=0)
    np.testing.assert_array_equal(new[97], mean.astype(np.float32))
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"]["97"]["special"]
    assert json.loads((out / "added_tokens.json").read_text())["<tool>"] == 97


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ((), "no tokens were given"),
        (("<a>", ""), "'' is empty"),
        (("<a>", "<a>"), "'<a>' is given 2 times"),
        (("w5",), "'w5' has the id 5 already"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(
    tmp_path: Path, tokens: tuple[str, ...], said: str
) -> None:
    source = dew.load(hf.save(hf.llama(), tmp_path / "base"))
    with pytest.raises(ValueError, match=f"cannot be extended: .*{said}"):
        dew.extend_vocabulary(source, tokens, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokens_without_a_row_get_one_as_new_tokens_do(tmp_path: Path) -> None:
    source = dew.load(hf.save(hf.llama(vocab_size=90), tmp_path / "base"))
    grown = dew.load(dew.extend_vocabulary(source, NEW, tmp_path / "out"))
    before, after = (
        np.asarray(side.variables["params"]["embed"]["weight"], np.float64)
        for side in (source, grown)
    )
    assert after.shape == (97 + len(NEW), before.shape[1])
    np.testing.assert_array_equal(after[:90], before)
    mean = np.broadcast_to(before.mean(axis=0), after[90:].shape)
    np.testing.assert_allclose(after[90:], mean, rtol=NEW_ROWS)


def test_dew_extend_certifies_what_it_writes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"extend --model {model} --out {tmp_path / 'out'} --json --add-tokens"
    assert main([*command.split(), *NEW]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ids"] == {"<tool>": 97, "<call>": 98, "<end of call>": 99}
    assert (result["vocab_size"], result["certificate"]["passed"]) == (100, True)


def losses(source: Any) -> tuple[Any, Any]:
    """Loss and gradient of one batch."""
    objective = CausalLM(source=source, seq_len=12)
    batch = {"tokens": jnp.asarray(hf.tokens(2, 12), jnp.int32)}

    def loss(params: Any) -> Any:
        return scalar_loss(objective, {"params": params}, batch, STEP)[0]

    graded = jax.jit(jax.value_and_grad(loss))
    value, gradient = graded(source.variables["params"])
    return value, {"params": gradient}


def test_padding_changes_neither_loss_nor_gradient(model: Path) -> None:
    source = dew.load(model)
    padded = dew.pad_vocabulary(source, 64)
    assert padded.variables["params"]["embed"]["weight"].shape == (128, 32)
    (want, slopes), (got, wider) = losses(source), losses(padded)
    np.testing.assert_allclose(got, want, rtol=RTOL["float32"])
    for path, slope in flatten(slopes).items():
        whole = flatten(wider)[path]
        assert hf.largest_difference(whole[: len(slope)], slope) <= FAMILY_GRADIENT
        assert not whole[len(slope) :].any()


def test_an_export_has_the_real_rows_alone(model: Path, tmp_path: Path) -> None:
    source = dew.load(model)
    padded = dew.pad_vocabulary(source, 64)
    leaves = flatten(padded.variables)
    moved = {path: leaf + 1 for path, leaf in leaves.items()}
    out = dew.save(padded, tmp_path / "out", unflatten(moved))
    before, after = (load_file(f / "model.safetensors") for f in (model, out))
    assert json.loads((out / "config.json").read_text())["vocab_size"] == hf.VOCAB
    for name, old in before.items():
        np.testing.assert_array_equal(after[name], old + np.float32(1))


def test_adapters_go_over_padded_tables_and_save_their_real_rows(
    tmp_path: Path,
) -> None:
    folder = hf.save(hf.llama(), tmp_path / "base")
    padded = dew.pad_vocabulary(dew.load(folder), 64)
    lora = dew.Lora(targets=("q_proj",), to_save=("embed_tokens", "lm_head"))
    source = dew.adapt(padded, lora, key=jax.random.key(0))
    dew.save(source, tmp_path / "adapter")
    dew.save(source, tmp_path / "merged", merge=True)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert tensors["base_model.model.lm_head.weight"].shape == (97, 32)
    ids = hf.tokens(1, 8)
    want = hf.logits_op_by_op(source, ids)
    for name in ("adapter", "merged"):
        got = hf.logits_op_by_op(dew.load(tmp_path / name), ids)
        assert hf.largest_difference(got, want) <= LOGITS


def test_what_cannot_be_padded_is_refused(tmp_path: Path) -> None:
    source = dew.load(hf.save(hf.llama(), tmp_path / "base"))
    padded = dew.pad_vocabulary(source, 64)
    assert dew.pad_vocabulary(source, 1) is source
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        dew.pad_vocabulary(source, 0)
    with pytest.raises(ValueError, match="a native decoder is padded"):
        dew.pad_vocabulary(padded, 128)
    with pytest.raises(ValueError, match="in a plain folder"):
        dew.extend_vocabulary(replace(padded), NEW, tmp_path / "out")


@pytest.mark.full
def test_a_padded_run_trains_exports_and_exports_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf.save(hf.llama(), tmp_path / "base")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 90}" for i in range(500)))
    run = tmp_path / "run"
    command = f"""pretrain --model {folder} --data {text} --out {run} --steps 2 --json
        --batch-size 8 --seq-len 16 --weight-decay 0.1"""
    assert main([*command.split(), "--pad-vocab", "64"]) == 0
    assert json.loads(capsys.readouterr().out)["certificate"]["passed"]
    assert main(["export", str(run), str(tmp_path / "again")]) == 0
    first, second = (
        (f / "model.safetensors").read_bytes()
        for f in (run / "export", tmp_path / "again")
    )
    assert first == second
