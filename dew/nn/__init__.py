"""Native transformer decoder and encoder as flax modules, one concept a file."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.nn.config import (
        MLP,
        Attention,
        Clamp,
        DecoderConfig,
        Embedding,
        EncoderConfig,
        Head,
        HeadConfig,
        Latent,
        MoE,
        Norm,
        QKNorm,
        Residual,
        TransformerConfig,
    )
    from dew.nn.decoder import Decoder
    from dew.nn.encoder import Encoder
    from dew.nn.rope import (
        Dynamic,
        LinearScaling,
        Llama3,
        LongRope,
        Proportional,
        Rope,
        Yarn,
    )

__all__ = [
    "MLP",
    "Attention",
    "Clamp",
    "Decoder",
    "DecoderConfig",
    "Dynamic",
    "Embedding",
    "Encoder",
    "EncoderConfig",
    "Head",
    "HeadConfig",
    "Latent",
    "LinearScaling",
    "Llama3",
    "LongRope",
    "MoE",
    "Norm",
    "Proportional",
    "QKNorm",
    "Residual",
    "Rope",
    "TransformerConfig",
    "Yarn",
]
