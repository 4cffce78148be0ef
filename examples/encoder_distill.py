"""Distillation of MiniLM's six blocks into three, by hidden states and relations.

The student keeps every second block of all-MiniLM-L6-v2 and is trained to match it on
sentences of Python's own reference manual. The score is the cosine of its embeddings
with the teacher's on held-out sentences.

    python -m examples.encoder_distill [OUT] [STEPS]
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import dew
from dew.converters.surgery import prune_layers
from dew.losses import HiddenMSE, Relation
from dew.objectives.distillation import Distillation, EncoderStates, mean_pooled
from dew.training import Trainer, adamw
from examples.support.weights import cached

KEPT = (1, 3, 5)
ROWS, SEQ = 16, 32
HELD_OUT_EVERY = 8


def sentences() -> tuple[list[str], list[str]]:
    """Returns training sentences, and the held-out ones of every eighth topic."""
    train: list[str] = []
    held_out: list[str] = []
    for i, name in enumerate(sorted(topics)):
        text = " ".join(topics[name].split())
        parts = [part for part in text.split(". ") if 30 < len(part) < 200]
        (train if i % HELD_OUT_EVERY else held_out).extend(parts)
    return train, held_out


def batch(tokenizer: Any, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns tokens and mask of one sentence per row, with its special tokens."""
    tokens = np.zeros((len(texts), SEQ), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, one in enumerate(tokenizer.encode_batch(list(texts))):
        # The folder's tokenizer adds padding of its own, which is removed here.
        ids = np.asarray(one.ids)[np.asarray(one.attention_mask, bool)][:SEQ]
        tokens[i, : len(ids)], mask[i, : len(ids)] = ids, True
    return {"tokens": tokens, "mask": mask}


def batches(tokenizer: Any, texts: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    draw = Random(0)
    while True:
        yield batch(tokenizer, draw.choices(texts, k=ROWS))


def agreement(sides: Sequence[tuple[Any, Any]], rows: dict[str, np.ndarray]) -> float:
    """Returns the mean cosine between the embeddings of two models."""
    inputs = {name: jnp.asarray(array) for name, array in rows.items()}
    first, second = (
        mean_pooled(jax.jit(model.apply)(variables, inputs).final, inputs["mask"])
        for model, variables in sides
    )
    return float(jnp.mean(jnp.sum(first * second, axis=-1)))


def run(out: Path, steps: int) -> dict[str, float]:
    teacher = dew.load(cached("minilm"))
    student = dew.load(prune_layers(teacher, KEPT, out / "student"))
    train, held_out = sentences()
    objective = Distillation(
        student=EncoderStates(source=student, seq_len=SEQ),
        teacher=EncoderStates(source=teacher, seq_len=SEQ),
        terms=(
            HiddenMSE(pairs=tuple(enumerate(KEPT))),
            Relation(pairs=((2, 5),), heads=12),
        ),
        measures=(),
        chunk=None,
        causal=False,
    )
    rows = batch(teacher.tokenizer, held_out[:256])
    reference = (teacher.model, teacher.variables)
    pruned = (student.model, student.variables)
    cosines = {"before": agreement([pruned, reference], rows)}
    trainer = Trainer(objective, adamw(3e-4), key=jax.random.key(0))
    state = trainer.fit(batches(teacher.tokenizer, train), steps=steps)
    task = objective.pipeline(state, ema=False)
    cosines["after"] = agreement([(task.source.model, task.variables), reference], rows)
    dew.save(task, out / "export")
    return cosines


if __name__ == "__main__":
    arguments = [*sys.argv[1:], *("runs/encoder", "200")[len(sys.argv) - 1 :]]
    cosines = run(Path(arguments[0]), int(arguments[1]))
    for name, cosine in cosines.items():
        Console().print(f"cosine with the teacher's embeddings, {name}: {cosine:.4f}")
