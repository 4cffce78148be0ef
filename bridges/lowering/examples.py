"""Random example inputs for a transformers model, from its main input and config."""

from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from dew.bridges.names import module_inputs
from dew.tasks.seq2seq_generation import DECODER_INPUTS

MANUAL = ("assert", "for", "with", "lambda")
"""Topics of Python's own manual, which every Python includes: a text of some length.
"""

WAVE = 4000
"""Samples of a waveform: a quarter of a second at 16 kHz."""

_FRAMES = "max_source_positions"


def random_inputs(
    module: PreTrainedModel, config: PreTrainedConfig
) -> dict[str, np.ndarray]:
    """Draws a small batch of inputs for a transformers model, by dew's names.

    Raises:
        ValueError: the main input is not text, images, waveforms or spectrograms.
    """
    rng, fields = np.random.default_rng(0), config.to_dict()
    text = config.get_text_config()
    tokens = rng.integers(0, text.vocab_size, (2, 8)) if _has_vocabulary(text) else None
    match module.main_input_name:
        case "input_ids" if tokens is not None:
            inputs: dict[str, Any] = {"tokens": tokens}
            if "attention_mask" in module_inputs(module):
                inputs["mask"] = np.ones((2, 8), bool)
            if "image" in module.input_modalities and not module.can_generate():
                # Two towers, whose output compares texts with images.
                inputs["pixel_values"] = _images(rng, config)
        case "pixel_values":
            inputs = {"pixel_values": _images(rng, config)}
        case "input_features" if fields.keys() >= {"num_mel_bins", _FRAMES}:
            shape = (2, fields["num_mel_bins"], 2 * fields[_FRAMES])
            inputs = {"input_features": rng.standard_normal(shape)}
        case "input_values":
            spectrum = [
                fields[n] for n in ("max_length", "num_mel_bins") if n in fields
            ]
            shape = (2, *spectrum) if len(spectrum) == 2 else (2, WAVE)
            inputs = {"input_values": rng.standard_normal(shape)}
        case name:
            raise ValueError(
                f"{type(module).__name__} reads {name}, for which no example can be "
                "guessed; pass example_inputs"
            )
    if config.is_encoder_decoder and tokens is not None:
        inputs[DECODER_INPUTS] = tokens
    return {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in inputs.items()
    }


def _images(rng: np.random.Generator, config: PreTrainedConfig) -> np.ndarray:
    vision = config.vision_config if "vision_config" in config.sub_configs else config
    # Convolutional models have no image size in the config; most were trained at 224.
    size = np.broadcast_to(vision.to_dict().get("image_size", 224), (2,))
    return rng.standard_normal((2, vision.num_channels, *size))


def _has_vocabulary(text: PreTrainedConfig) -> bool:
    return "vocab_size" in text.to_dict()
