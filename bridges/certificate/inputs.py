"""What two forwards are compared on: a small batch of a module's kind, or texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from dew.bridges.lowering.model import Lowered
from dew.bridges.names import module_inputs
from dew.converters.pretrained import Pretrained
from dew.tasks.seq2seq_generation import DECODER_INPUTS, padded

TEXTS = frozenset(("input_ids", "attention_mask", "token_type_ids", DECODER_INPUTS))
"""What a model that reads text alone takes, by torch's names."""

LONGEST, WRITTEN = 512, 64
"""Tokens of the longest rows to read, and of what decoders have written by then."""

MANUAL = ("assert", "for", "with", "lambda")
"""Parts of Python's own manual, which every Python carries: a text of some length."""

WAVE = 4000
"""Samples of a waveform: a quarter of a second, for most."""

_FRAMES = "max_source_positions"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One batch of inputs by name, and which of its positions [batch, seq] are real.

    `real` is None where positions of answers are not those of what was read.
    """

    inputs: Mapping[str, Any]
    real: np.ndarray | None = None

    @property
    def longest(self) -> int:
        """Tokens in a row, 0 where none are read."""
        return 0 if "tokens" not in self.inputs else self.inputs["tokens"].shape[1]


def probes(ours: Pretrained, theirs: Any, texts: Sequence[str]) -> list[Probe]:
    """Returns what to compare on: long rows and padded texts for models of text.

    Other models read the example that they were lowered on.
    """
    match ours.model:
        case Lowered(example=example) if not TEXTS.issuperset(example):
            return [Probe(inputs=example)]
    config = theirs.config.get_text_config()
    # State-space models have no longest text, and torch unrolls theirs step by step.
    length = min(LONGEST, config.to_dict().get("max_position_embeddings") or 64)
    drawn = np.random.default_rng(0).integers(0, config.vocab_size, length // 2)
    batches = [[drawn.tolist()]]
    if ours.tokenizer is not None:
        manual = "\n\n".join(topics[name] for name in MANUAL)
        batches.append([ours.tokenizer.encode(manual).ids[:length]])
        batches.append([ours.tokenizer.encode(text).ids for text in texts])
    if "attention_mask" not in module_inputs(theirs):
        # Without masks there is no padding.
        rows = [padded([row])["tokens"] for rows in batches for row in rows]
        return [Probe(inputs={"tokens": row}) for row in rows]
    inputs = [padded(rows) for rows in batches]
    if not theirs.config.is_encoder_decoder:
        return [Probe(inputs=read, real=read["mask"]) for read in inputs]
    # A decoder may be given anything: the start of what its encoder reads, here.
    return [
        Probe(inputs={**read, DECODER_INPUTS: read["tokens"][:, :WRITTEN]})
        for read in inputs
    ]


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
