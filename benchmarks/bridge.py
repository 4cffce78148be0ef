"""Benchmark of a torch teacher's forward pass by every road, relative to torch.

    python benchmarks/bridge.py [ROUNDS]

SmolLM2-135M on rows of real text, float32: torch, lowered under jit, live beside a
student's step and without one, the native decoder, and torchax where it imports.
Each round runs all of them, and ratios of tokens per second are medians over the
rounds, so that other load on the machine affects all alike. Then the cost of passing
logits from torch to JAX, compilation time by depth, and the memory of a lowering beside
its weights.
"""

import gc
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

import dew
from dew.bridges import LiveTeacher, load_lowered, lower, to_jax

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.support.weights import cached

ROWS, SEQ = 2, 128
DEPTHS = (2, 4, 8, 16)


def time_call(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def run_in_rounds(
    calls: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds of each call in each round, after one warm-up call."""
    for call in calls.values():
        time_call(call)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(time_call(call))
    return seconds


def token_rows(source: Any) -> np.ndarray:
    ids = source.tokenizer.encode("\n\n".join(topics[n] for n in sorted(topics))).ids
    return np.array(ids[: ROWS * SEQ], np.int32).reshape(ROWS, SEQ)


def forwards(folder: Path, rounds: int) -> None:
    """Prints each road's tokens per second in the forward pass, relative to torch."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    module = load(folder, dtype=torch.float32).eval()
    lowered, native = load_lowered(folder), dew.load(folder, road="native")
    ids = token_rows(native)
    tokens = torch.from_numpy(ids).long()

    @torch.inference_mode()
    def by_torch() -> Any:
        return module(tokens, use_cache=False).logits

    def by_jax(source: Any) -> Callable[[], Any]:
        run = jax.jit(lambda v, x: source.model.apply(v, {"tokens": x}).logits)
        array = jnp.asarray(ids)
        return lambda: run(source.variables, array)

    live = LiveTeacher(module=module, inputs=("tokens",))
    calls: dict[str, Callable[[], Any]] = {
        "torch": by_torch,
        "lowered": by_jax(lowered),
        "native": by_jax(native),
        "live": lambda: live.score({"tokens": ids}),
        **torchax_forward(module, tokens),
    }
    seconds = run_in_rounds(calls, rounds)
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"forward of {ROWS} x {SEQ} tokens, {rounds} rounds in turn")
    for name, column in seconds.items():
        ratio = median(t / s for s, t in zip(column, seconds["torch"], strict=True))
        speed = ROWS * SEQ / median(column)
        print(f"  {name:8} {speed:7.0f} tokens/s, {ratio:.2f} of torch's speed")
    overlap(live, by_jax(native), ids, rounds)


def torchax_forward(module: Any, tokens: Any) -> dict[str, Callable[[], Any]]:
    """Returns the forward pass by torchax, if that package is installed."""
    if importlib.util.find_spec("torchax") is None:
        print("torchax is not installed and left out")
        return {}
    torchax: Any = importlib.import_module("torchax")

    weights, function = torchax.extract_jax(module)
    run, array = jax.jit(function), jnp.asarray(tokens.numpy())
    return {"torchax": lambda: run(weights, (array,))[0]}


def overlap(
    live: LiveTeacher, step: Callable[[], Any], ids: np.ndarray, rounds: int
) -> None:
    """Times four steps with batches scored before each, and ahead of it in a thread."""
    batches = [{"tokens": ids}] * 4

    def one_after_the_other() -> None:
        for batch in batches:
            live.score(batch)
            jax.block_until_ready(step())

    def ahead() -> None:
        with live.score_stream(batches) as stream:
            for _ in stream:
                jax.block_until_ready(step())

    def alone() -> None:
        for _ in batches:
            jax.block_until_ready(step())

    seconds = run_in_rounds(
        {"alone": alone, "before": one_after_the_other, "ahead": ahead}, rounds
    )
    hidden = median(
        (before - ahead) / (before - alone)
        for alone, before, ahead in zip(*seconds.values(), strict=True)
    )
    middle = {name: median(column) / 4 * 1e3 for name, column in seconds.items()}
    print(f"a step of the native decoder: {middle['alone']:.0f} ms,")
    print(f"  with a live teacher before it {middle['before']:.0f} ms,")
    print(f"  with one ahead of it {middle['ahead']:.0f} ms: {hidden:.0%} is hidden")


def copies(rounds: int) -> None:
    """Times the passing of one tensor of logits to JAX: shared and copied."""
    logits = torch.randn(ROWS, SEQ, 49152)
    calls = {
        "shared": lambda: to_jax(logits),
        "copied": lambda: to_jax(logits, copy=True),
        "by numpy": lambda: jnp.array(logits.numpy()),
    }
    print(f"logits of {logits.numel() * 4 / 2**20:.0f} MiB, torch to JAX")
    for name, column in run_in_rounds(calls, rounds).items():
        print(f"  {name:8} {median(column) * 1e3:8.2f} ms")


def depths() -> None:
    """Times export, tracing and compilation of a narrow Llama at several depths."""
    print("a Llama of width 64: seconds to export; to trace and compile")
    ids = np.arange(2 * 16).reshape(2, 16)
    for layers in DEPTHS:
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=layers,
        )
        module: Any = transformers.LlamaForCausalLM(config).eval()
        lowered = lower(module, {"tokens": ids}, check=False)
        made = time_call(lambda lowered=lowered: lowered.num_blocks)
        run = jax.jit(lambda v, x, m=lowered: m.apply(v, {"tokens": x}).logits)
        compiled = time_call(lambda r=run, m=lowered: r(m.variables, jnp.asarray(ids)))
        print(f"  {layers:3} layers: {made:.1f}; {compiled:.1f}")


MEMORY = """
import resource, sys
import jax, numpy as np, transformers
from dew.bridges import load_lowered, lower
def highest():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
# A small lowering first, so that the libraries' own memory is in `before`.
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1,
)
ids = np.ones((2, 8), np.int32)
lower(transformers.LlamaForCausalLM(config).eval(), {"tokens": ids})
before = highest()
source = load_lowered(sys.argv[1], check=False)
source.model.num_blocks
made = highest()
source.model.apply(source.variables, {"tokens": ids}).logits.block_until_ready()
size = sum(leaf.nbytes for leaf in jax.tree.leaves(source.variables))
print(size / 2**20, (made - before) / size, (highest() - before) / size)
"""


def memory(folder: Path) -> None:
    """Prints a lowering's peak memory above a process that loaded the libraries."""
    command = [sys.executable, "-c", MEMORY, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, made, run = map(float, done.stdout.split())
    print(f"host memory of a lowering: {made:.2f} of its {size:.0f} MiB of weights,")
    print(f"  {run:.2f} once it is compiled and has run")


def main(rounds: int = 7) -> None:
    folder = cached("smollm2")
    print(f"load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads in torch")
    memory(folder)
    forwards(folder, rounds)
    gc.collect()
    copies(rounds)
    depths()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
