"""Decoders without a language-model head, from folders as transformers writes them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

import dew
from dew.cli import main
from dew.losses.hidden_states import HiddenMSE
from dew.nn.decoder import Decoder
from dew.objectives import CausalLM
from dew.objectives.base import Step, scalar_loss
from dew.objectives.distillation import Distillation, EncoderStates
from dew.training import Trainer, adamw
from dew.typing import Variables
from tests.converters.families.decoders import DECODERS
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

QUICK = ("llama", "mistral", "qwen2", "gemma")


def trunk(family: str, folder: Path, seed: int = 0) -> Path:
    tiny = DECODERS[family]
    config = tiny.config(**tiny.fields)
    make = transformers.AutoModel.from_config
    return hf.save(hf.build(config, seed, make=make), folder)


def states_apart(source: dew.Pretrained, folder: Path) -> float:
    ids = hf.tokens(seq=24) % 48
    outputs = source.model.apply(
        source.variables, {"tokens": jnp.asarray(ids, jnp.int32)}
    )
    assert outputs.logits is None
    want = hf.reloaded(folder)(hf.torch.tensor(ids)).last_hidden_state
    return hf.largest_difference(np.asarray(outputs.final), want.detach().numpy())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.full)
        for name in sorted(DECODERS)
    ],
)
def test_a_trunk_loads_natively_and_is_exported_as_one(
    family: str, tmp_path: Path
) -> None:
    folder = trunk(family, tmp_path / "trunk")
    source = dew.load(folder)
    assert (source.road, type(source.model)) == ("native", Decoder)
    assert states_apart(source, folder) < LOGITS
    export = dew.save(source, tmp_path / "export")
    assert (export / "config.json").read_bytes() == (
        folder / "config.json"
    ).read_bytes()
    assert dew.load(export).content_hash == source.content_hash
    certificate = dew.certify(export)
    assert certificate.passed, certificate.faults


def test_a_trunk_trains_by_its_hidden_states(tmp_path: Path) -> None:
    teacher = dew.load(trunk("llama", tmp_path / "teacher"))
    student = dew.load(trunk("llama", tmp_path / "student", seed=1))
    objective = Distillation(
        student=EncoderStates(source=student, seq_len=16),
        teacher=EncoderStates(source=teacher, seq_len=16),
        terms=(HiddenMSE(pairs=((2, 2),)),),
    )
    batch = {"tokens": jnp.asarray(hf.tokens(4, 16), jnp.int32)}

    def loss(variables: Variables) -> float:
        step = Step(jnp.int32(0), jax.random.key(1))
        return float(scalar_loss(objective, variables, batch, step)[0])

    before = loss(objective.init(jax.random.key(0)))
    trainer = Trainer(objective, adamw(1e-2), key=jax.random.key(0))
    state = trainer.fit(iter([batch] * 8), steps=8)
    assert loss(state.variables) < 0.8 * before
    export = dew.save(objective.pipeline(state, ema=False), tmp_path / "export")
    certificate = dew.certify(export)
    assert certificate.passed, certificate.faults
    assert certificate.architecture == "LlamaModel"


def test_a_loss_of_logits_refuses_a_trunk_and_names_the_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trunk("llama", tmp_path / "trunk")
    with pytest.raises(ValueError, match="language-model head"):
        CausalLM(source=dew.load(folder), seq_len=16)
    (tmp_path / "text.txt").write_text("w1 w2 w3 " * 50)
    data, out = ["--data", str(tmp_path / "text.txt")], ["--out", str(tmp_path / "run")]
    for command in (
        ["pretrain", "--model", str(folder), *data, *out],
        ["eval", "--model", str(folder), *data],
        ["generate", "--model", str(folder), "--prompt", "w1"],
    ):
        capsys.readouterr()
        assert main(command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "is a LlamaModel, which has no language-model head" in said


def test_a_head_beside_a_trunk_is_carried_as_transformers_ignores_it(
    tmp_path: Path,
) -> None:
    folder = hf.save(hf.llama(tie_word_embeddings=False), tmp_path / "model")
    hf.edit_config(folder, architectures=["LlamaModel"])
    source = dew.load(folder)
    model = source.model
    assert isinstance(model, Decoder)
    assert model.config.head is None
    export = dew.save(source, tmp_path / "export")
    assert dew.load(export).content_hash == source.content_hash
    stored, kept = (load_file(f / "model.safetensors") for f in (folder, export))
    assert stored.keys() == kept.keys() >= {"lm_head.weight"}
    assert all(np.array_equal(stored[name], kept[name]) for name in stored)
    assert json.loads((export / "config.json").read_text())["architectures"] == [
        "LlamaModel"
    ]
