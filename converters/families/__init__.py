"""One small declarative file per architecture."""

from collections.abc import Mapping

from dew.converters.families.albert import ALBERT
from dew.converters.families.base import Family
from dew.converters.families.bert import BERT
from dew.converters.families.bloom import BLOOM
from dew.converters.families.cohere import COHERE
from dew.converters.families.cohere2 import COHERE2
from dew.converters.families.deepseek_v2 import DEEPSEEK_V2
from dew.converters.families.deepseek_v3 import DEEPSEEK_V3
from dew.converters.families.distilbert import DISTILBERT
from dew.converters.families.electra import ELECTRA
from dew.converters.families.exaone4 import EXAONE4
from dew.converters.families.falcon import FALCON
from dew.converters.families.gemma import GEMMA
from dew.converters.families.gemma2 import GEMMA2
from dew.converters.families.gemma3 import GEMMA3
from dew.converters.families.glm4 import GLM4
from dew.converters.families.gpt2 import GPT2
from dew.converters.families.gpt_neox import GPT_NEOX
from dew.converters.families.gpt_oss import GPT_OSS
from dew.converters.families.gptj import GPTJ
from dew.converters.families.granite import GRANITE
from dew.converters.families.granitemoe import GRANITEMOE
from dew.converters.families.llama import LLAMA
from dew.converters.families.mistral import MISTRAL
from dew.converters.families.mixtral import MIXTRAL
from dew.converters.families.modernbert import MODERNBERT
from dew.converters.families.olmo import OLMO
from dew.converters.families.olmo2 import OLMO2
from dew.converters.families.olmo3 import OLMO3
from dew.converters.families.olmoe import OLMOE
from dew.converters.families.opt import OPT
from dew.converters.families.phi import PHI
from dew.converters.families.phi3 import PHI3
from dew.converters.families.qwen2 import QWEN2
from dew.converters.families.qwen2_moe import QWEN2_MOE
from dew.converters.families.qwen3 import QWEN3
from dew.converters.families.qwen3_moe import QWEN3_MOE
from dew.converters.families.roberta import ROBERTA
from dew.converters.families.smollm3 import SMOLLM3
from dew.converters.families.stablelm import STABLELM
from dew.converters.families.starcoder2 import STARCODER2

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        SMOLLM3,
        GRANITE,
        OLMO,
        OLMO2,
        OLMO3,
        EXAONE4,
        GEMMA,
        GEMMA2,
        GEMMA3,
        PHI3,
        STARCODER2,
        STABLELM,
        COHERE,
        COHERE2,
        GLM4,
        GPT2,
        GPT_NEOX,
        GPTJ,
        PHI,
        OPT,
        BLOOM,
        FALCON,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        GRANITEMOE,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        BERT,
        ROBERTA,
        DISTILBERT,
        ELECTRA,
        ALBERT,
        MODERNBERT,
    )
}
"""The architectures of the native road, by `model_type`."""

__all__ = ["FAMILIES", "Family"]
