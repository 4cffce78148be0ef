"""Benchmark of loading and saving, beside safetensors and transformers.

    python benchmarks/load.py [ROUNDS] [FOLDER ...]

Without folders: SmolLM2-135M in float32 and bfloat16, and a random Llama of 1.2 GiB in
bfloat16. Files are read once before, so that all read from the page cache; every weight
is touched after a load, since maps are read on access. Seconds are
medians over the rounds, ratios medians of each round's; memory is the peak above what
the process held before, as a part of the file's bytes, and file pages count in it; what
a load before left behind lowers it, and the bound is asserted, in processes of their
own, by tests/converters/folder/test_memory.py.
"""

import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

import dew

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.support.weights import cached

LLAMA = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=2,
    architectures=["LlamaForCausalLM"],
    dtype=torch.bfloat16,
)


def random_llama(folder: Path) -> Path:
    LLAMA.save_pretrained(folder)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(LLAMA).state_dict()
    noise = np.random.default_rng(0).integers(0x3C00, 0x3D00, 1 << 20, np.uint16)
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = {n: np.resize(noise, t.shape).view(dtype) for n, t in shapes.items()}
    # As in hub files: tensors are aligned to 8 bytes and not to 64.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def touch_pages(arrays: Iterator[np.ndarray]) -> None:
    """Reads a byte of every page."""
    for array in arrays:
        np.ravel(array, "K").view(np.uint8)[::4096].max(initial=0)


def bare(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    touch_pages(iter(tensors.values()))
    return tensors


def load_by_dew(folder: Path, dtype: str | None = None) -> Any:
    source = dew.load(folder, dtype=dtype)
    touch_pages(np.asarray(leaf) for leaf in jax.tree.leaves(source.variables))
    return source


def load_by_transformers(folder: Path, dtype: torch.dtype | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    touch_pages(t.detach().view(torch.uint8).numpy() for t in model.parameters())
    return model


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(field))


def measure(work: Callable[[], Any]) -> tuple[float, int]:
    """Returns seconds, and the peak memory in bytes above that before the call."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = status("VmRSS"), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return seconds, status("VmHWM") - before


def compare(title: str, ways: dict[str, Callable[[], Any]], rounds: int, size: int):
    results = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, work in ways.items():
            result = measure(work)
            # The first round imports, compiles and fills the page cache.
            if turn:
                results[name].append(result)
    table = Table("what", "seconds", "GB/s", "times the first", "peak", title=title)
    first = [seconds for seconds, _ in next(iter(results.values()))]
    for name, rounds_of_one in results.items():
        seconds, peaks = zip(*rounds_of_one, strict=True)
        ratio = median(s / f for s, f in zip(seconds, first, strict=True))
        middle, peak = median(seconds), median(peaks) / size
        speed = size / middle / 1e9
        row = f"{middle:.3f}", f"{speed:.2f}", f"{ratio:.2f}", f"{peak:.2f}"
        table.add_row(name, *row)
    Console(width=100).print(table)


def run(folder: Path, rounds: int, scratch: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    title = f"{folder.name}, {size / 2**30:.2f} GiB"
    ways = {
        "safetensors, bare": lambda: bare(folder),
        "dew.load": lambda: load_by_dew(folder),
        "dew.load, float32": lambda: load_by_dew(folder, "float32"),
        "from_pretrained": lambda: load_by_transformers(folder),
        "from_pretrained, float32": lambda: load_by_transformers(folder, torch.float32),
    }
    compare(f"load {title}", ways, rounds, size)
    tensors, source, model = (
        bare(folder),
        load_by_dew(folder),
        load_by_transformers(folder),
    )
    # Other arrays over the same memory: variables that count as trained.
    moved = jax.tree.map(lambda leaf: leaf.addressable_data(0), source.variables)
    wide = load_by_dew(folder, "float32")
    wider = jax.tree.map(lambda leaf: leaf.addressable_data(0), wide.variables)

    def to(work: Callable[[Path], Any]) -> Callable[[], None]:
        def write() -> None:
            shutil.rmtree(scratch / "out", ignore_errors=True)
            work(scratch / "out")

        return write

    def bare_save(out: Path) -> None:
        out.mkdir()
        save_file(dict(tensors), out / "model.safetensors")

    ways = {
        "safetensors, bare": to(bare_save),
        "dew.save": to(lambda out: dew.save(source, out, moved)),
        "save_pretrained": to(lambda out: model.save_pretrained(out)),
        "dew.save, of float32": to(lambda out: dew.save(wide, out, wider)),
    }
    compare(f"save {title}", ways, rounds, size)


def main(rounds: int, *folders: str) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        given = [Path(folder) for folder in folders]
        if not given:
            given = [cached("smollm2"), cached("smollm2", dtype="bfloat16")]
            given.append(random_llama(Path(scratch) / "llama"))
        for folder in given:
            run(folder, rounds, Path(scratch))


if __name__ == "__main__":
    count, *folders = sys.argv[1:] or ["5"]
    main(int(count), *folders)
