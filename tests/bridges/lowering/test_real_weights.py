"""Real weights of other modalities by the lowered road, on real inputs."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_sample_image

from dew.bridges import load_lowered
from examples.support.weights import cached
from tests.support import hf_models as hf
from tests.support.tolerances import LOGITS

pytestmark = pytest.mark.full

PHOTOS = ("china", "flower")


def bells(seconds: float = 4.0, rate: int = 16000) -> np.ndarray:
    """Three struck bells: partials that decay, a second apart."""
    time = np.arange(int(seconds * rate)) / rate
    since = [np.maximum(time - start, 0) for start in (0.2, 1.2, 2.2)]
    partials = [
        np.sin(2 * np.pi * pitch * ratio * t) * np.exp(-3 * ratio * t) * (t > 0) / ratio
        for pitch, t in zip((440, 523, 659), since, strict=True)
        for ratio in (1, 2, 2.76, 5.4)
    ]
    return np.sum(partials, axis=0).astype(np.float32)


def test_a_real_whisper_hears_and_writes_what_torchs_does() -> None:
    folder = cached("whisper")
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    extractor: Any = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    heard = extractor(bells(), sampling_rate=16000, return_tensors="np").input_features
    with torch.no_grad():
        features = torch.tensor(heard)
        ids = model.generate(features, max_new_tokens=12, do_sample=False)
        want = model(features, decoder_input_ids=ids).logits.numpy()
    inputs = {"input_features": heard, "decoder_input_ids": ids.numpy()}
    loaded = load_lowered(folder, dtype="float32", example_inputs=inputs)
    got = np.asarray(loaded.model.apply(loaded.variables, inputs).logits)
    assert hf.largest_difference(got, want) < LOGITS
    np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))


def test_a_real_dinov2_sees_what_torchs_does() -> None:
    folder = cached("dinov2")
    model: Any = transformers.Dinov2Model.from_pretrained(folder).eval()
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder)
    photos = [Image.fromarray(load_sample_image(f"{n}.jpg")) for n in PHOTOS]
    pixels = processor(photos, return_tensors="np")["pixel_values"]
    with torch.no_grad():
        want = model(torch.tensor(pixels))
    loaded = load_lowered(folder, example_inputs={"pixel_values": pixels})
    lowered: Any = loaded.model
    got = lowered.outputs(loaded.variables, {"pixel_values": pixels})
    for name in ("last_hidden_state", "pooler_output"):
        gap = hf.largest_difference(np.asarray(got[name]), want[name].numpy())
        assert gap < LOGITS
