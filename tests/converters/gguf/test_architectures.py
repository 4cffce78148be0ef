"""GGUF files against the transformers models they were made from."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from dew.converters.gguf.architectures.table import ARCHITECTURES
from dew.converters.gguf.convert import folder_from_gguf
from dew.converters.load import load_native
from tests.converters.gguf.cases import CASES
from tests.converters.gguf.writer import (
    Case,
    config_of,
    gguf_of,
    logits,
    randomized,
    reloaded,
    write_gguf,
)
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

# What only records where a config came from or how weights were first drawn.
UNUSED_FIELDS = {
    "_name_or_path",
    "architectures",
    "initializer_range",
    "model_type",
    "transformers_version",
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny llama as GGUF, with no tokenizer."""
    return gguf_of(CASES["llama"], tmp_path)[1]


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A case's model, its own folder, and the folder made of its GGUF file."""

    name: str
    model: Any
    source: Path
    out: Path


@pytest.fixture(scope="module", params=CASES)
def converted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Converted:
    folder = tmp_path_factory.mktemp("gguf")
    model, path = gguf_of(CASES[request.param], folder)
    out = folder_from_gguf(path, folder / "out")
    return Converted(name=request.param, model=model, source=folder / "source", out=out)


def test_every_tensor_is_the_one_the_file_was_made_from(converted: Converted) -> None:
    got, want = weights_of(converted.out), weights_of(converted.source)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        np.testing.assert_array_equal(got[key], tensor, err_msg=key)


# Fields that change nothing in these families, or that transformers fills in itself.
INERT_FIELDS = {
    "mistral": {"sliding_window", "mlp_bias", "attention_bias", "pretraining_tp"},
    "mixtral": {"head_dim"},
    "gemma": {"hidden_activation"},
    "gemma3": {"sliding_window_pattern"},
    "phi3": {"partial_rotary_factor"},
    "phi3 longrope, partly rotated": {"partial_rotary_factor"},
    "bloom": {"seq_length", "bos_token_id", "eos_token_id"},
    "gpt2": {"bos_token_id", "eos_token_id"},
    "falcon, one kv head": {"num_kv_heads", "num_ln_in_parallel_attn"},
}


def test_transformers_loads_the_folder_as_the_same_model(converted: Converted) -> None:
    again, report = reloaded(converted.out)
    assert not any(report.values())
    np.testing.assert_array_equal(logits(again), logits(converted.model))
    got, want = again.config.to_dict(), converted.model.config.to_dict()
    aside = UNUSED_FIELDS | INERT_FIELDS.get(converted.name, set())
    assert not {
        key: (got.get(key), want.get(key))
        for key in (got.keys() | want.keys()) - aside
        if got.get(key) != want.get(key)
    }


def test_our_own_road_gives_the_same_logits(converted: Converted) -> None:
    ids = np.arange(2 * 24).reshape(2, 24) % 96
    ours = hf.logits_op_by_op(load_native(converted.out), ids)
    want = logits(converted.model)
    print(f"{converted.name}: {hf.largest_difference(ours, want):.2e}")
    assert hf.largest_difference(ours, want) < LOGITS


def test_every_table_has_a_case() -> None:
    proven = {case.config.model_type for case in CASES.values()}
    assert {arch.model_type for arch in ARCHITECTURES.values()} <= proven


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16"])
def test_quantised_weights_come_back_as_the_gguf_package_reads_them(
    kind: str, tmp_path: Path
) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    embed = np.random.default_rng(0).normal(size=(96, 32)).astype(np.float32)
    path = tiny_gpt2(tmp_path / "tiny.gguf", embed, stored)
    got = weights_of(folder_from_gguf(path, tmp_path / "out"))
    want = gguf.quants.dequantize(gguf.quants.quantize(embed, stored), stored)
    np.testing.assert_array_equal(got["transformer.wte.weight"], want)


def test_a_q4_1_block_is_a_scale_a_floor_and_32_nibbles(tmp_path: Path) -> None:
    embed = np.random.default_rng(0).normal(size=(96, 32)).astype(np.float32)
    stored = gguf.GGMLQuantizationType.Q4_1
    path = tiny_gpt2(tmp_path / "tiny.gguf", embed, stored)
    blocks = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
    read = np.frombuffer(gguf.quants.quantize(embed, stored).tobytes(), blocks)
    nibbles = np.concatenate([read["q"] & 15, read["q"] >> 4], axis=1)
    scale, floor = (read[key].astype(np.float32)[:, None] for key in ("d", "m"))
    got = weights_of(folder_from_gguf(path, tmp_path / "out"))
    np.testing.assert_array_equal(
        got["transformer.wte.weight"], scale * nibbles + floor
    )


def tiny_gpt2(path: Path, embed: np.ndarray, kind: gguf.GGMLQuantizationType) -> Path:
    ones = np.ones(32, np.float32)
    tensors = {
        "token_embd.weight": embed,
        "position_embd.weight": embed[:64],
        "output_norm.weight": ones,
        "output_norm.bias": ones,
    }

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(0)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(128)
        writer.add_head_count(4)
        writer.add_layer_norm_eps(1e-5)

    return write_gguf(path, "gpt2", tensors, metadata, kind)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_once_to_the_dtype_asked_for(
    dtype: str, llama: Path, tmp_path: Path
) -> None:
    import torch

    model, _ = reloaded(folder_from_gguf(llama, tmp_path / "out", dtype=dtype))
    want = randomized(CASES["llama"].config).to(getattr(torch, dtype)).state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, want[name]), name


def test_a_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    embed = np.full((96, 32), 70000.0, np.float32)
    path = tiny_gpt2(tmp_path / "tiny.gguf", embed, gguf.GGMLQuantizationType.F32)
    with pytest.raises(ValueError, match=r"w.e\.weight reaches 70000, beyond float16"):
        folder_from_gguf(path, tmp_path / "out", dtype="float16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


def changed(case: Case, tmp_path: Path, write: Any, raw: Any = None) -> Path:
    """Makes the case's file with more metadata, or more tensors, than it has."""

    def extra(writer: gguf.GGUFWriter, config: Any) -> None:
        case.extra(writer, config)
        write(writer)

    more = Case(
        arch=case.arch,
        config=case.config,
        change=case.change,
        extra=extra,
        is_listed=case.is_listed,
        raw=raw or {},
    )
    return gguf_of(more, tmp_path)[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.scale", 0.5),
        ("llama.logit_scale", 2.0),
        ("llama.rope.scaling.yarn_ext_factor", 0.5),
        ("llama.something_new", 1.0),
    ],
)
def test_metadata_that_would_change_the_maths_is_refused_by_name(
    key: str, value: float, tmp_path: Path
) -> None:
    path = changed(CASES["llama"], tmp_path, lambda w: w.add_float32(key, value))
    with pytest.raises(ValueError, match=re.escape(f"{key} = {value}")):
        folder_from_gguf(path, tmp_path / "out")


def test_metadata_under_other_prefixes_only_describes(tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_string("quantize.imatrix.file", "some.dat")
        writer.add_string("general.license", "apache-2.0")

    path = changed(CASES["llama"], tmp_path, write)
    assert config_of(folder_from_gguf(path, tmp_path / "out"))["model_type"] == "llama"


def test_unknown_and_missing_tensors_are_all_named(tmp_path: Path) -> None:
    case = CASES["llama"]
    raw = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = changed(case, tmp_path, lambda w: w.add_block_count(3), raw)
    with pytest.raises(ValueError, match=r"blk\.2\.attn_q\.weight is missing") as told:
        folder_from_gguf(path, tmp_path / "out")
    assert "blk.0.attn_sinks.weight is unknown" in str(told.value)


def test_a_bias_on_some_projections_only_is_refused(tmp_path: Path) -> None:
    raw = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    path = changed(CASES["llama"], tmp_path, lambda w: None, raw)
    with pytest.raises(ValueError, match=r"blk\.1\.attn_output\.bias is missing"):
        folder_from_gguf(path, tmp_path / "out")


def test_a_rope_table_of_other_parameters_is_refused(tmp_path: Path) -> None:
    raw = {"rope_freqs.weight": np.linspace(1, 8, 8).astype(np.float32)}
    path = changed(CASES["llama"], tmp_path, lambda w: None, raw)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight must be the factors"):
        folder_from_gguf(path, tmp_path / "out")


def test_yarn_without_its_factor_is_refused(tmp_path: Path) -> None:
    yarn = gguf.RopeScalingType.YARN
    path = changed(CASES["llama"], tmp_path, lambda w: w.add_rope_scaling_type(yarn))
    with pytest.raises(ValueError, match=r"'yarn' needs llama\.rope\.scaling\.factor"):
        folder_from_gguf(path, tmp_path / "out")


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "mamba", {}, lambda w: None)
    with pytest.raises(ValueError, match=r"one of llama, .*qwen2.*, got 'mamba'"):
        folder_from_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("llama.attention.value_length", 8, "value_length must be key_length 16: 8"),
        ("llama.vocab_size", 95, "vocab_size is 95, but token_embd has 96 rows"),
        ("split.count", 2, "one of 2 parts"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(
    key: str, value: int, told: str, tmp_path: Path
) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        for data in writer.kv_data:
            data.pop(key, None)
        writer.add_uint32(key, value)

    path = changed(CASES["llama"], tmp_path, write)
    with pytest.raises(ValueError, match=told):
        folder_from_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("expert_gating_func", 4, r"1 \(softmax\) or 2 \(sigmoid\), got 4"),
        ("expert_weights_norm", 1, "must be false under a softmax"),
        ("expert_shared_count", 0, "expert_shared_count must be at least 1, got 0"),
        ("attention.head_count_kv", 2, "must be 1 or head_count 4, got 2"),
        ("attention.value_length", 12, "latent's 24 with .* 8, got 32 and 12"),
        ("attention.key_length_mla", 8, "above rope.dimension_count 8, got 8 and 12"),
    ],
)
def test_metadata_of_a_latent_that_no_class_computes_is_refused(
    key: str, value: int, told: str, tmp_path: Path
) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        for data in writer.kv_data:
            data.pop(f"deepseek2.{key}", None)
        writer.add_uint32(f"deepseek2.{key}", value)

    path = changed(CASES["deepseek2, a lite V2"], tmp_path, write)
    with pytest.raises(ValueError, match=told):
        folder_from_gguf(path, tmp_path / "out")


def test_what_is_no_gguf_file_is_told_from_one_cut_short(
    llama: Path, tmp_path: Path
) -> None:
    text, short = tmp_path / "text.gguf", tmp_path / "short.gguf"
    text.write_text("not a model")
    short.write_bytes(llama.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"text\.gguf is not a GGUF file: .*b'not '"):
        folder_from_gguf(text, tmp_path / "out")
    with pytest.raises(ValueError, match=r"short\.gguf cannot be read .* cut short"):
        folder_from_gguf(short, tmp_path / "out")


def test_a_folder_that_exists_is_left_alone(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source exists"):
        folder_from_gguf(llama, tmp_path / "source")


def test_without_the_gguf_package_the_error_says_what_to_install(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dew-bridge\[gguf\]'"):
        folder_from_gguf(llama, tmp_path / "out")


def test_the_real_model_loads_and_answers(smollm2: Path) -> None:
    import transformers

    model, report = reloaded(smollm2)
    assert not any(report.values())
    assert sum(weight.size for weight in weights_of(smollm2).values()) == 134_515_008
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer("x =  2").input_ids == [104, 446, 256, 34]
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert prompt.input_ids.tolist() == [[504, 3575, 282, 4649, 314]]
    best = model(**prompt).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"


def test_the_real_weights_are_those_another_reader_found(smollm2: Path) -> None:
    """The digest is of a reader that shares no code with ours or the gguf package."""
    weights, digest = weights_of(smollm2), hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].tobytes())
    assert digest.hexdigest() == (
        "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
    )
