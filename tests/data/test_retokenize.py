"""One text in the tokens of two real tokenizers, and ULD between two models on it."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from dew.data import training_batches
from dew.data.retokenize import RESPELLED, Retokenized
from dew.losses.divergences import CrossEntropy, ForwardKL
from dew.losses.uld import ULD
from dew.nn.config import MLP, Attention, DecoderConfig
from dew.nn.decoder import Decoder
from dew.nn.rope import Rope
from dew.objectives.base import Step, scalar_loss
from dew.objectives.causal_lm import CausalLM
from dew.objectives.distillation.cross_tokenizer import CrossTokenizerTeacher
from dew.objectives.distillation.objective import Distillation
from tests.support.models import loaded
from tests.support.tolerances import RTOL

TEXTS = [
    "The cat — naïve as ever — sat on the mat, 42 times.",
    "def f(x):\n    return x ** 2  # squared",
    "Ünïcödé and emoji 🙂 stay whole.",
]


@pytest.fixture(scope="module")
def tokenizers(smollm2: Any) -> tuple[Tokenizer, Tokenizer]:
    """SmolLM2's bytes in pairs, and MiniLM's uncased word pieces."""
    from examples.support.weights import cached

    folders = smollm2, cached("minilm")
    ours, theirs = (Tokenizer.from_file(str(f / "tokenizer.json")) for f in folders)
    theirs.no_truncation()
    theirs.no_padding()
    return ours, theirs


def stream(tokenizers: Any, **options: Any) -> Retokenized:
    ours, theirs = tokenizers
    data = training_batches(
        TEXTS, tokenizer=ours, seq_len=24, batch_size=2, seed=0, eos_id=2, **options
    )
    return Retokenized(data, student=ours, teacher=theirs, seq_len=32)


def test_spans_cover_the_same_text_on_both_sides(tokenizers: Any) -> None:
    ours, theirs = tokenizers
    batch = next(stream(tokenizers))
    seen = 0
    for row in range(2):
        part = {name: array[row] for name, array in batch.items()}
        for at in np.flatnonzero(part["span_starts"]):
            span = part["span_of_student"][at]
            here = np.flatnonzero(part["span_of_student"] == span) + 1
            there = np.flatnonzero(part["span_of_teacher"] == span) + 1
            assert there[0] == part["span_teacher_at"][at] + 1
            mine = ours.decode(part["tokens"][here].tolist())
            pieces = part["respelled_tokens"][there].tolist()
            others = theirs.decode(pieces, skip_special_tokens=False)
            # Word pieces lose case, accents and spaces; letters and digits stay.
            plain = theirs.normalizer.normalize_str(mine).replace(" ", "")
            # What WordPiece has no piece for, it cannot give back.
            if "[UNK]" not in others:
                assert plain.strip() == others.replace("##", "").replace(" ", "")
            seen += 1
    # Of 48 tokens; the others are specials, first ones, or finer than a word piece.
    assert seen >= 20


def test_a_respelled_stream_resumes_where_it_stood(tokenizers: Any) -> None:
    one = stream(tokenizers)
    next(one)
    position, want = one.get_state(), next(one)
    again = stream(tokenizers)
    again.set_state(position)
    got = next(again)
    for name in ("tokens", *RESPELLED):
        np.testing.assert_array_equal(got[name], want[name])


@cache
def tiny(vocab: int, seq: int) -> CausalLM:
    attention = Attention(heads=2, kv_heads=1, head_dim=4, rope=Rope(dim=4))
    config = DecoderConfig(
        vocab=vocab, embed=8, layers=1, attention=attention, mlp=MLP(dim=6)
    )
    inputs = {"tokens": jax.ShapeDtypeStruct((1, seq), jnp.int32)}
    return CausalLM(source=loaded(Decoder(config), inputs), seq_len=seq)


def ranked(probs: np.ndarray, width: int) -> np.ndarray:
    return np.sort(np.pad(probs, (0, width - len(probs))))[::-1]


def softmax(objective: CausalLM, inputs: Any) -> np.ndarray:
    variables = objective.init(jax.random.key(0))
    step = Step(jnp.int32(0), jax.random.key(0))
    logits = objective.predict(variables, inputs, step, train=False)[2].logits
    return np.asarray(jax.nn.softmax(jnp.asarray(logits)), np.float64)


def by_hand(batch: Any, q: np.ndarray, p: np.ndarray) -> float:
    """The sum of ULD over all spans, by loops."""
    total = 0.0
    for row, at in zip(*np.nonzero(batch["span_starts"]), strict=True):
        if batch["segment_ids"][row, at] != batch["segment_ids"][row, at + 1]:
            continue
        span, sides = batch["span_of_student"][row, at], []
        start = batch["span_teacher_at"][row, at]
        for probs, tokens, owner, first in (
            (q, batch["tokens"], batch["span_of_student"], at),
            (p, batch["respelled_tokens"], batch["span_of_teacher"], start),
        ):
            rest = [i for i in np.flatnonzero(owner[row] == span) if i > first]
            share = np.prod([probs[row, i, tokens[row, i + 1]] for i in rest])
            sides.append(ranked(probs[row, first] * share, 49152))
        total += np.abs(sides[0] - sides[1]).sum()
    return total


@pytest.mark.full
def test_a_student_learns_across_tokenizers_by_uld(tokenizers: Any) -> None:
    batch = next(stream(tokenizers))
    student, teacher = tiny(49152, 24), tiny(30522, 32)
    objective = Distillation(
        student=student,
        teacher=CrossTokenizerTeacher(objective=teacher),
        terms=(ULD(), CrossEntropy(weight=0.5)),
    )
    variables = objective.init(jax.random.key(0))
    step = Step(jnp.int32(0), jax.random.key(0))
    arrays = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    _, aux = jax.jit(lambda v, b: scalar_loss(objective, v, b, step))(variables, arrays)
    theirs = {
        "tokens": arrays["respelled_tokens"],
        "positions": arrays["respelled_positions"],
        "segment_ids": arrays["respelled_segments"],
    }
    want = by_hand(batch, softmax(student, arrays), softmax(teacher, theirs))
    np.testing.assert_allclose(aux.metrics["uld"].total, want, rtol=RTOL["float32"])
    assert want > 1


def test_other_terms_are_refused_across_tokenizers() -> None:
    with pytest.raises(
        ValueError, match=r"CrossTokenizerTeacher: ForwardKL reads .* \(for ULD\)"
    ):
        Distillation(
            student=tiny(49152, 24),
            teacher=CrossTokenizerTeacher(objective=tiny(30522, 32)),
            terms=(ForwardKL(),),
        )
