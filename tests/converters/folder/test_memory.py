"""Loading and saving stream: the peak is the weights and little more."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dew.converters.folder.safetensors import Spec, write_file
from tests.support import hf_models as hf

MIB = 1 << 20

PEAK = """
def peak():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
"""

SCRIPT = f"""
import sys
import dew, jax
{PEAK}
jax.block_until_ready(jax.numpy.zeros(8) + 1)
dew.load(sys.argv[1])
before = peak()
source = dew.load(sys.argv[2], dtype=sys.argv[4] or None)
loaded = peak()
leaves = jax.tree.leaves(source.variables)
# Other arrays over the same memory: variables that count as trained.
moved = jax.tree.map(lambda leaf: leaf.addressable_data(0), source.variables)
dew.save(source, sys.argv[3], moved, dtype=sys.argv[5] or None)
sizes = [leaf.nbytes for leaf in leaves]
print(before, loaded, peak(), sum(sizes), max(sizes))
"""

LOWERING = f"""
import sys
import jax
from dew.bridges import load_lowered
{PEAK}
load_lowered(sys.argv[1])
before = peak()
source = load_lowered(sys.argv[2], check=False)
assert source.model.num_blocks == 9
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(source.variables))
print(before, peak(), weights)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(hf.llama(), tmp_path_factory.mktemp("small") / "m")


@pytest.fixture(scope="module")
def large(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.1 GiB of bfloat16 that stand, as those of transformers do, on no 64 bytes."""
    folder = tmp_path_factory.mktemp("large") / "m"
    folder.mkdir()
    config = json.loads((small / "config.json").read_text())
    config |= {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 6144}
    config |= {"num_hidden_layers": 9, "num_attention_heads": 16, "dtype": "bfloat16"}
    config["head_dim"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"vocab": 32000, "embed": 2048, "mlp": 6144, "kv": 256, "layers": 9}
    specs = {spec.name: spec for spec in llama_specs(**sizes)}
    noise = np.random.default_rng(0).integers(0x3C00, 0x3D00, 1 << 20, np.uint16)

    def values(name: str) -> np.ndarray:
        spec = specs[name]
        return np.resize(noise, spec.shape).view(spec.dtype)

    file = folder / "model.safetensors"
    write_file(file, specs.values(), values, {"pad": ""}, release=lambda name: None)
    shift_by_32(file)
    return folder


def llama_specs(vocab: int, embed: int, mlp: int, kv: int, layers: int) -> list[Spec]:
    """The tensors of a Llama."""
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocab, embed),
        "model.embed_tokens.weight": (vocab, embed),
        "model.norm.weight": (embed,),
    }
    for n in range(layers):
        layer = f"model.layers.{n}."
        for x, rows in (("q", embed), ("k", kv), ("v", kv), ("o", embed)):
            shapes[f"{layer}self_attn.{x}_proj.weight"] = (rows, embed)
        shapes[layer + "mlp.gate_proj.weight"] = (mlp, embed)
        shapes[layer + "mlp.up_proj.weight"] = (mlp, embed)
        shapes[layer + "mlp.down_proj.weight"] = (embed, mlp)
        shapes[layer + "input_layernorm.weight"] = (embed,)
        shapes[layer + "post_attention_layernorm.weight"] = (embed,)
    dtype = np.dtype(ml_dtypes.bfloat16)
    return [Spec(name=n, dtype=dtype, shape=shape) for n, shape in shapes.items()]


def shift_by_32(file: Path) -> None:
    """Lengthens the header by half an alignment."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = (length + 32).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 32
    file.write_bytes(head + data[8 + length :])


@pytest.mark.full
@pytest.mark.parametrize("dtypes", [("", ""), ("float32", ""), ("", "float32")])
def test_peak_memory_is_the_weights_and_two_tensors(
    small: Path, large: Path, tmp_path: Path, dtypes: tuple[str, str]
) -> None:
    arguments = [str(small), str(large), str(tmp_path / "out"), *dtypes]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    before, loaded, saved, weights, largest = map(int, run.stdout.split())
    assert weights >= 1 << 30
    # What is written in float32 is twice as large as what was loaded in bfloat16.
    largest *= 2 if dtypes[1] else 1
    allowed = weights + 2 * largest + 256 * MIB
    assert loaded - before <= allowed, (loaded - before) / MIB
    assert saved - before <= allowed, (saved - before) / MIB
    print(
        f"load {(loaded - before) / weights:.2f}, save {(saved - before) / weights:.2f}"
    )


@pytest.mark.full
def test_a_lowering_takes_the_weights_and_a_quarter_at_most(
    small: Path, large: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOWERING, str(small), str(large)],
        capture_output=True,
        text=True,
        check=True,
    )
    before, lowered, weights = map(int, run.stdout.split())
    share = (lowered - before) / weights
    assert share <= 1.25
    print(f"lower {share:.2f}")
