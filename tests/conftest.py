"""Sets the machine up before jax and torch load: fake devices, strict promotion."""

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests compile much and compute little: without LLVM's costly passes the tiny decoder
# compiles in a quarter of the time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import pytest

from tests.support import sampling

# Set before workers start: they inherit it, and draw the samples of this process.
sampling.daily_seed()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Many tests train the same tiny models: what one has compiled serves the others.
# Workers inherit the folder from the process that starts them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="dew-xla-"))
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_report_header() -> str:
    """Prints the seed of the sampled tables, and how to repeat it."""
    return f"sampled tables: {sampling.VARIABLE}={sampling.daily_seed()}"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in float32, downloaded once into `.cache/`."""
    from examples.support.weights import cached

    return cached("smollm2")


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A new T5 of one block a side with a real tokenizer, by the lowered road."""
    import dew
    from examples import seq2seq_t5

    folder = seq2seq_t5.prepare(tmp_path_factory.mktemp("t5"), layers=1)
    return dew.load(folder, road="lowered")
