"""Example inputs for a torch module, by its main input and config."""

from typing import Any

import numpy as np

from dew.bridges.names import module_inputs
from dew.tasks.seq2seq_generation import DECODER_INPUTS

MANUAL = ("assert", "for", "with", "lambda")
"""Parts of Python's own manual, which every Python carries: a text of some length."""


WAVE = 4000
"""Samples of a waveform: a quarter of a second, for most."""


_FRAMES = "max_source_positions"


def random_inputs(module: Any, config: Any) -> dict[str, np.ndarray]:
    """Draws a small batch of what a transformers model reads, by its main input.

    Raises:
        ValueError: that input is none of text, images, waves and spectra.
    """
    rng, fields = np.random.default_rng(0), config.to_dict()
    text = config.get_text_config()
    tokens = rng.integers(0, text.vocab_size, (2, 8)) if _has(text) else None
    match module.main_input_name:
        case "input_ids" if tokens is not None:
            inputs: dict[str, Any] = {"tokens": tokens}
            if "attention_mask" in module_inputs(module):
                inputs["mask"] = np.ones((2, 8), bool)
            if "image" in module.input_modalities and not module.can_generate():
                # Two towers, which answer with how near texts and images are.
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
                f"{type(module).__name__} reads {name}, of which no example can be "
                "guessed; pass example_inputs"
            )
    if config.is_encoder_decoder and tokens is not None:
        inputs[DECODER_INPUTS] = tokens
    return {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in inputs.items()
    }


def _images(rng: np.random.Generator, config: Any) -> np.ndarray:
    vision = config.vision_config if "vision_config" in config.sub_configs else config
    # Convolutions take any size; this is the one that most were trained at.
    size = np.broadcast_to(vision.to_dict().get("image_size", 224), (2,))
    return rng.standard_normal((2, vision.num_channels, *size))


def _has(text: Any) -> bool:
    return "vocab_size" in text.to_dict()
