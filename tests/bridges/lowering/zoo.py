"""The architectures that lowering is held to: tiny random models of each.

A row is a transformers model class, a config small enough for a second, and what the
model eats. `tests/bridges/lowering/test_zoo.py` compares each with torch, outputs and
gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

BATCH, SEQ, VOCAB = 2, 12, 97


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model: class, config, inputs; gradients start at the output `loss_from`."""

    model: str
    config: str
    settings: Mapping[str, Any]
    inputs: Callable[[], dict[str, np.ndarray]]
    loss_from: str = "logits"
    group: str = "causal"
    eager: bool = False
    notes: str = ""

    def build(self) -> torch.nn.Module:
        """Draws the model from a fixed seed."""
        kind = getattr(transformers, self.config)
        config = kind(**self.settings)
        if self.eager:
            config._attn_implementation = "eager"
        return drawn(getattr(transformers, self.model), config)


def drawn(kind: Any, config: Any) -> Any:
    """A model of a class and a config, from a fixed seed."""
    torch.manual_seed(0)
    model = kind(config)
    # Fresh biases, scales and tokens are zeros and ones, which would hide a swap.
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model.eval()


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def text(seq: int = SEQ, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """A batch of two: one full row, one padded on the left."""
    mask = np.ones((BATCH, seq), np.int32)
    mask[1, :3] = 0
    return {"tokens": rng().integers(3, vocab, (BATCH, seq)), "mask": mask}


def right_padded() -> dict[str, np.ndarray]:
    """The same padded on the right, for encoders."""
    batch = text()
    return {**batch, "mask": batch["mask"][:, ::-1].copy()}


def pairs() -> dict[str, np.ndarray]:
    """Source text and the decoder's own."""
    return {
        **right_padded(),
        "decoder_input_ids": rng().integers(3, VOCAB, (BATCH, 7)),
    }


def pixels(size: int = 32) -> dict[str, np.ndarray]:
    """Two images, channels first."""
    drawn = rng().standard_normal((BATCH, 3, size, size))
    return {"pixel_values": drawn.astype(np.float32)}


def text_and_pixels() -> dict[str, np.ndarray]:
    """Captions with their images."""
    return {**right_padded(), **pixels()}


def mel() -> dict[str, np.ndarray]:
    """Log-mel frames and the decoder's tokens."""
    return {
        "input_features": rng().standard_normal((BATCH, 8, 40)).astype(np.float32),
        "decoder_input_ids": rng().integers(3, VOCAB, (BATCH, 5)),
    }


def wave() -> dict[str, np.ndarray]:
    """Raw audio."""
    return {"input_values": rng().standard_normal((BATCH, 400)).astype(np.float32)}


BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_KV = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
MOE = {**BASE, "moe_intermediate_size": 24, "num_experts_per_tok": 2}


def causal(name: str, base: Mapping[str, Any] = BASE, **more: Any) -> Entry:
    """A causal LM named as transformers names its classes."""
    options = {k: more.pop(k) for k in ("inputs", "eager", "notes") if k in more}
    return Entry(
        model=f"{name}ForCausalLM",
        config=f"{name}Config",
        settings={**base, **more},
        inputs=options.pop("inputs", text),
        **options,
    )


ZOO: dict[str, Entry] = {
    "llama": causal("Llama"),
    "llama_tied_yarn": causal(
        "Llama",
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral": causal("Mistral", sliding_window=5, head_dim=8),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3", head_dim=8),
    "gemma": causal("Gemma", head_dim=8),
    "gemma2": causal("Gemma2", head_dim=8, sliding_window=5, eager=True),
    "gemma3": Entry(
        model="Gemma3ForCausalLM",
        config="Gemma3TextConfig",
        settings={**BASE, "head_dim": 8, "sliding_window": 5},
        inputs=text,
    ),
    "phi": causal("Phi", NO_KV),
    "phi3": causal("Phi3"),
    "gpt2": Entry(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        settings={
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
        },
        inputs=text,
    ),
    "gpt_neox": causal("GPTNeoX", NO_KV),
    "gptj": Entry(
        model="GPTJForCausalLM",
        config="GPTJConfig",
        settings={
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
        },
        inputs=text,
    ),
    "opt": Entry(
        model="OPTForCausalLM",
        config="OPTConfig",
        settings={**NO_KV, "ffn_dim": 48, "word_embed_proj_dim": 32},
        inputs=text,
    ),
    "bloom": Entry(
        model="BloomForCausalLM",
        config="BloomConfig",
        settings={"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        inputs=text,
    ),
    "falcon": causal("Falcon", NO_KV, new_decoder_architecture=True, num_kv_heads=2),
    "olmo": causal("Olmo"),
    "olmo2": causal("Olmo2"),
    "olmo3": causal("Olmo3", sliding_window=5),
    "smollm3": causal("SmolLM3"),
    "granite": causal("Granite", logits_scaling=2.0, residual_multiplier=0.5),
    "cohere": causal("Cohere"),
    "cohere2": causal("Cohere2", sliding_window=5),
    "starcoder2": causal("Starcoder2"),
    "stablelm": causal("StableLm"),
    "glm4": causal("Glm4", head_dim=8),
    "exaone4": causal("Exaone4", sliding_window=5, sliding_window_pattern=2),
    "mixtral": causal("Mixtral", num_local_experts=4),
    "qwen2_moe": causal(
        "Qwen2Moe", MOE, num_experts=4, shared_expert_intermediate_size=24
    ),
    "qwen3_moe": causal("Qwen3Moe", MOE, num_experts=4, head_dim=8),
    "olmoe": causal("Olmoe", BASE, num_experts=4, num_experts_per_tok=2),
    "granitemoe": causal(
        "GraniteMoe", BASE, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v2": causal(
        "DeepseekV2",
        {**MOE, "num_key_value_heads": 4},
        n_routed_experts=4,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        head_dim=4,
    ),
    "deepseek_v3": causal(
        "DeepseekV3",
        {**MOE, "num_key_value_heads": 4},
        n_routed_experts=4,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=2,
        topk_group=1,
    ),
    "gpt_oss": causal(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=5,
    ),
    "gemma3n": Entry(
        model="Gemma3nForCausalLM",
        config="Gemma3nTextConfig",
        settings={
            **BASE,
            "head_dim": 8,
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "intermediate_size": [48] * 4,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        },
        inputs=text,
    ),
    "qwen3_next": causal(
        "Qwen3Next",
        MOE,
        num_experts=4,
        head_dim=8,
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "mamba": Entry(
        model="MambaForCausalLM",
        config="MambaConfig",
        settings={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 4,
        },
        inputs=text,
    ),
    "mamba2": Entry(
        model="Mamba2ForCausalLM",
        config="Mamba2Config",
        settings={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
        inputs=text,
    ),
    "lfm2": causal(
        "Lfm2",
        layer_types=["conv", "full_attention"],
        block_ff_dim=48,
        block_multiple_of=8,
    ),
    "glm4_moe": causal(
        "Glm4Moe",
        MOE,
        n_routed_experts=4,
        head_dim=8,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "mpt": Entry(
        model="MptForCausalLM",
        config="MptConfig",
        settings={
            "vocab_size": VOCAB,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            "expansion_ratio": 2,
        },
        inputs=text,
    ),
    "bert": Entry(
        model="BertForMaskedLM",
        config="BertConfig",
        settings=NO_KV,
        inputs=right_padded,
        group="encoder",
    ),
    "bert_classifier": Entry(
        model="BertForSequenceClassification",
        config="BertConfig",
        settings={**NO_KV, "num_labels": 3},
        inputs=right_padded,
        group="encoder",
    ),
    "roberta": Entry(
        model="RobertaForMaskedLM",
        config="RobertaConfig",
        settings=NO_KV,
        inputs=right_padded,
        group="encoder",
    ),
    "distilbert": Entry(
        model="DistilBertForMaskedLM",
        config="DistilBertConfig",
        settings={
            "vocab_size": VOCAB,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
        },
        inputs=right_padded,
        group="encoder",
    ),
    "electra": Entry(
        model="ElectraForMaskedLM",
        config="ElectraConfig",
        settings={**NO_KV, "embedding_size": 16},
        inputs=right_padded,
        group="encoder",
    ),
    "albert": Entry(
        model="AlbertForMaskedLM",
        config="AlbertConfig",
        settings={**NO_KV, "embedding_size": 16},
        inputs=right_padded,
        group="encoder",
    ),
    "deberta_v2": Entry(
        model="DebertaV2ForMaskedLM",
        config="DebertaV2Config",
        settings={
            **NO_KV,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        inputs=right_padded,
        group="encoder",
    ),
    "modernbert": Entry(
        model="ModernBertForMaskedLM",
        config="ModernBertConfig",
        settings={**NO_KV, "local_attention": 6, "global_attn_every_n_layers": 2},
        inputs=right_padded,
        group="encoder",
    ),
    "t5": Entry(
        model="T5ForConditionalGeneration",
        config="T5Config",
        settings={
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        inputs=pairs,
        group="encoder-decoder",
    ),
    "bart": Entry(
        model="BartForConditionalGeneration",
        config="BartConfig",
        settings={
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        inputs=pairs,
        group="encoder-decoder",
    ),
    "marian": Entry(
        model="MarianMTModel",
        config="MarianConfig",
        settings={
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        inputs=pairs,
        group="encoder-decoder",
    ),
    "whisper": Entry(
        model="WhisperForConditionalGeneration",
        config="WhisperConfig",
        settings={
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        inputs=mel,
        group="encoder-decoder",
    ),
    "vit": Entry(
        model="ViTForImageClassification",
        config="ViTConfig",
        settings={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
            "num_labels": 5,
        },
        inputs=pixels,
        group="vision",
    ),
    "dinov2": Entry(
        model="Dinov2Model",
        config="Dinov2Config",
        settings={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "mlp_ratio": 2,
            "image_size": 48,
            "patch_size": 8,
        },
        inputs=pixels,
        loss_from="last_hidden_state",
        group="vision",
        notes="positions interpolated",
    ),
    "siglip_vision": Entry(
        model="SiglipVisionModel",
        config="SiglipVisionConfig",
        settings={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
        },
        inputs=pixels,
        loss_from="pooler_output",
        group="vision",
    ),
    "siglip_text": Entry(
        model="SiglipTextModel",
        config="SiglipTextConfig",
        settings=NO_KV,
        inputs=right_padded,
        loss_from="pooler_output",
        group="vision",
    ),
    "clip": Entry(
        model="CLIPModel",
        config="CLIPConfig",
        settings={
            "text_config": {**NO_KV, "projection_dim": 16},
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "image_size": 32,
                "patch_size": 8,
                "projection_dim": 16,
            },
            "projection_dim": 16,
        },
        inputs=text_and_pixels,
        loss_from="logits_per_image",
        group="vision",
        notes="both towers",
    ),
    "convnext": Entry(
        model="ConvNextForImageClassification",
        config="ConvNextConfig",
        settings={
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [1, 1, 2, 1],
            "num_labels": 5,
            "image_size": 32,
        },
        inputs=pixels,
        group="vision",
    ),
    "wav2vec2": Entry(
        model="Wav2Vec2ForCTC",
        config="Wav2Vec2Config",
        settings={
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "pad_token_id": 0,
        },
        inputs=wave,
        group="speech",
    ),
}
