"""Batches for the trainer and for evaluation."""

from collections.abc import Sequence

import grain
import numpy as np
from tokenizers import Tokenizer

from dew.data.packing import Packing
from dew.data.stream import Batches, Stream
from dew.data.tokenize import Encode


def training_batches(
    *documents: Sequence[str],
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    seed: int,
    packing: Packing = "wrapped",
    bos_id: int | tuple[int, ...] | None = None,
    eos_id: int | None = None,
    epochs: int | None = None,
    weights: Sequence[float] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Batches:
    """Returns batches of all documents, shuffled anew each epoch, without end.

    Args:
        *documents: sequences of texts: `open_documents(…)`, or a list of strings.
        tokenizer: read only; its template, truncation and padding are not applied.
        seq_len: tokens in a row.
        batch_size: rows in the global batch.
        seed: of the order; equal seeds give equal batches.
        packing: `wrapped` has no padding, `best_fit` splits no document that fits a
            row, `apart` has one document a row; see `dew.data.packing.Packing`.
        bos_id: put before every document: a token, or those of `template_prefix`.
        eos_id: put after every document.
        epochs: how many to read; the last batch is then filled up with padding.
        weights: the share of documents drawn from each of `documents`, which are then
            each shuffled and repeated apart; without, an epoch is all of them once.
        shard: this process's index and the number of processes. Each gets its part of
            the rows of every batch; in order they make up the global batch. Every
            process reads and tokenizes all documents, since where a row starts depends
            on the length of every document before it.

    Raises:
        ValueError: an argument is out of range; all of them are named.

    >>> import dew
    >>> tokenizer = dew.load(FOLDER).tokenizer
    >>> batches = training_batches(
    ...     ["w1 w2 w3"], tokenizer=tokenizer, seq_len=6, batch_size=1, seed=0
    ... )
    >>> batch = next(batches)
    >>> batch["tokens"].tolist(), batch["segment_ids"].tolist()
    ([[1, 2, 3, 1, 2, 3]], [[1, 1, 1, 2, 2, 2]])
    """
    stream = Stream(
        documents=documents,
        encode=Encode(tokenizer=tokenizer, bos_id=bos_id, eos_id=eos_id),
        seq_len=seq_len,
        batch_size=batch_size,
        packing=packing,
        shard=shard,
    )
    _refuse([*stream.faults(), *_order_faults(documents, seed, epochs, weights)])
    sources = [grain.MapDataset.source(part) for part in documents]
    # Documents are shuffled, not rows: shuffling rows would need all of them packed
    # first, or a buffer, and a buffer is a state too large to save. An order of
    # documents is a function of seed, epoch and index alone, so a position is a few
    # integers, and new neighbours each epoch cut documents at new places.
    if weights is None:
        ordered = grain.MapDataset.concatenate(sources).shuffle(_seed(seed, 0))
        ordered = ordered.repeat(epochs)
    else:
        mixed = [
            source.shuffle(_seed(seed, place)).repeat()
            for place, source in enumerate(sources)
        ]
        ordered = grain.MapDataset.mix(mixed, list(weights))
    shares = None if weights is None else list(weights)
    return stream.batches(ordered, {"seed": seed, "weights": shares})


def evaluation_batches(
    *documents: Sequence[str],
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
    packing: Packing = "wrapped",
    bos_id: int | tuple[int, ...] | None = None,
    eos_id: int | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Batches:
    """Returns one pass over all documents, in order, in batches of one shape.

    The last row and the last batch are filled up with padding. The arguments are those
    of `training_batches`.

    Raises:
        ValueError: an argument is out of range; all of them are named.

    >>> import dew
    >>> tokenizer = dew.load(FOLDER).tokenizer
    >>> batches = evaluation_batches(
    ...     ["w1 w2 w3"], tokenizer=tokenizer, seq_len=4, batch_size=1
    ... )
    >>> [batch["tokens"].tolist() for batch in batches]
    [[[1, 2, 3, 0]]]
    """
    stream = Stream(
        documents=documents,
        encode=Encode(tokenizer=tokenizer, bos_id=bos_id, eos_id=eos_id),
        seq_len=seq_len,
        batch_size=batch_size,
        packing=packing,
        shard=shard,
    )
    _refuse(stream.faults())
    sources = [grain.MapDataset.source(part) for part in documents]
    return stream.batches(grain.MapDataset.concatenate(sources), {"seed": None})


def _order_faults(
    documents: Sequence[Sequence[str]],
    seed: int,
    epochs: int | None,
    weights: Sequence[float] | None,
) -> list[str]:
    faults = [] if seed >= 0 else [f"seed must be at least 0, got {seed}"]
    if epochs is not None and epochs < 1:
        faults.append(f"epochs must be at least 1, or None for no end, got {epochs}")
    if weights is None:
        return faults
    if len(weights) != len(documents) or not all(weight > 0 for weight in weights):
        faults.append(
            f"weights must be one positive number for each of the {len(documents)} "
            f"sequences of documents, got {list(weights)}"
        )
    if not all(map(len, documents)):
        faults.append("weights need a document in every sequence, and one is empty")
    if epochs is not None:
        faults.append(
            f"a weighted mix has no epochs; give weights or epochs={epochs}, not both"
        )
    return faults


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise ValueError("; ".join(faults))


def _seed(seed: int, place: int) -> int:
    # Grain reseeds epoch n with seed + n: unscrambled, the second epoch of seed 0 would
    # be the first of seed 1.
    return int(np.random.SeedSequence((seed, place)).generate_state(1)[0])
