"""MiniLM's six blocks become three, by hidden states and relations alone.

The student keeps every second block of all-MiniLM-L6-v2 and learns from it on
sentences of Python's own reference manual. It is scored by the
cosine of its embeddings with the teacher's on sentences that were held out.

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
from dew.converters.surgery.prune_depth import prune_layers
from dew.losses.hidden_states import HiddenMSE, Relation
from dew.objectives.distillation.encoder_states import EncoderStates, mean_pooled
from dew.objectives.distillation.objective import Distillation
from dew.training.optimizers import adamw
from dew.training.trainer import Trainer
from examples.support.weights import cached

KEPT = (1, 3, 5)
ROWS, SEQ = 16, 32
HELD_OUT_EVERY = 8


def sentences() -> tuple[list[str], list[str]]:
    """Sentences to learn from, and those of every eighth topic."""
    train: list[str] = []
    held_out: list[str] = []
    for i, name in enumerate(sorted(topics)):
        text = " ".join(topics[name].split())
        found = [one for one in text.split(". ") if 30 < len(one) < 200]
        (train if i % HELD_OUT_EVERY else held_out).extend(found)
    return train, held_out


def batch(tokenizer: Any, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Rows of one sentence each, with its first and last special tokens."""
    tokens = np.zeros((len(texts), SEQ), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, one in enumerate(tokenizer.encode_batch(list(texts))):
        # The folder's tokenizer pads by itself.
        ids = np.asarray(one.ids)[np.asarray(one.attention_mask, bool)][:SEQ]
        tokens[i, : len(ids)], mask[i, : len(ids)] = ids, True
    return {"tokens": tokens, "mask": mask}


def batches(tokenizer: Any, texts: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    draw = Random(0)
    while True:
        yield batch(tokenizer, draw.choices(texts, k=ROWS))


def agreement(sides: Sequence[tuple[Any, Any]], rows: dict[str, np.ndarray]) -> float:
    """The mean cosine of both sides' embeddings."""
    inputs = {name: jnp.asarray(array) for name, array in rows.items()}
    ours, theirs = (
        mean_pooled(jax.jit(model.apply)(variables, inputs).final, inputs["mask"])
        for model, variables in sides
    )
    return float(jnp.mean(jnp.sum(ours * theirs, axis=-1)))


def run(out: Path, steps: int) -> dict[str, float]:
    teacher = dew.load(cached("minilm"))
    student = dew.load(prune_layers(teacher, KEPT, out / "student"))
    train, held_out = sentences()
    objective = Distillation(
        student=EncoderStates(source=student, seq_len=SEQ),
        teacher=EncoderStates(source=teacher, seq_len=SEQ),
        terms=(),
        hidden=(HiddenMSE(pairs=tuple(enumerate(KEPT))),),
        relations=(Relation(pairs=((2, 5),), heads=12),),
        measures=(),
        chunk=None,
        causal=False,
    )
    rows = batch(teacher.tokenizer, held_out[:256])
    whole = (teacher.model, teacher.variables)
    found = {"before": agreement([(student.model, student.variables), whole], rows)}
    trainer = Trainer(objective, adamw(3e-4), key=jax.random.key(0))
    state = trainer.fit(batches(teacher.tokenizer, train), steps=steps)
    task = objective.pipeline(state, ema=False)
    found["after"] = agreement([(task.source.model, task.variables), whole], rows)
    dew.save(task, out / "export")
    return found


if __name__ == "__main__":
    arguments = [*sys.argv[1:], *("runs/encoder", "200")[len(sys.argv) - 1 :]]
    found = run(Path(arguments[0]), int(arguments[1]))
    for name, cosine in found.items():
        Console().print(f"cosine with the teacher's embeddings, {name}: {cosine:.4f}")
