"""Cases of all GGUF architectures, by name, in the groups of their tables."""

from tests.converters.gguf.latent_cases import LATENT
from tests.converters.gguf.layernorm_cases import LAYERNORM
from tests.converters.gguf.rmsnorm_cases import RMSNORM
from tests.converters.gguf.windowed_cases import WINDOWED
from tests.converters.gguf.writer import Case

CASES: dict[str, Case] = {**RMSNORM, **LAYERNORM, **WINDOWED, **LATENT}
