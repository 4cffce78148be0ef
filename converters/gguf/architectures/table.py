"""All supported GGUF architectures, by `general.architecture`.

Each was admitted when a file with the layout of llama.cpp's converter came back equal
to the transformers model that it was made from. A new one is a row here and a row in
the test.
"""

from collections.abc import Mapping

from dew.converters.gguf.architectures.latent import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_WHOLE,
    DEEPSEEK_V3,
    DEEPSEEK_V3_WHOLE,
)
from dew.converters.gguf.architectures.layernorm import (
    BLOOM,
    COHERE,
    FALCON,
    FALCON_TWO_NORMS,
    GPT2,
    GPT_NEOX,
    OLMO,
    PHI2,
    STABLELM,
    STARCODER2,
)
from dew.converters.gguf.architectures.rmsnorm import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM4,
    GRANITE,
    GRANITE_MOE,
    LLAMA,
    MIXTRAL,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)
from dew.converters.gguf.architectures.windowed import (
    COHERE2,
    EXAONE4,
    GPT_OSS,
    OLMO3,
    SMOLLM3,
)
from dew.converters.gguf.rows import Arch

ARCHITECTURES: Mapping[str, Arch] = {
    "llama": LLAMA,
    "llama with experts": MIXTRAL,
    "granite": GRANITE,
    "qwen2": QWEN2,
    "qwen2moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "gpt2": GPT2,
    "bloom": BLOOM,
    "falcon": FALCON,
    "falcon with two norms": FALCON_TWO_NORMS,
    "starcoder2": STARCODER2,
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmo2 with windows": OLMO3,
    "olmoe": OLMOE,
    "granitemoe": GRANITE_MOE,
    "glm4": GLM4,
    "stablelm": STABLELM,
    "command-r": COHERE,
    "cohere2": COHERE2,
    "smollm3": SMOLLM3,
    "exaone4": EXAONE4,
    "gpt-oss": GPT_OSS,
    "phi2": PHI2,
    "gptneox": GPT_NEOX,
    "deepseek2": DEEPSEEK_V2,
    "deepseek2, kv_b whole": DEEPSEEK_V2_WHOLE,
    "deepseek2 with sigmoid": DEEPSEEK_V3,
    "deepseek2 with sigmoid, kv_b whole": DEEPSEEK_V3_WHOLE,
}
"""Tables by GGUF's name; one that has several layouts has a table for each."""
