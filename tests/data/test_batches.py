"""Packed batches, against documents tokenized one by one."""

import json
from collections import Counter, UserList
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dew.data import (
    Batches,
    Packing,
    evaluation_batches,
    open_documents,
    training_batches,
)
from dew.data.stream import PackedBatch

SEQ_LEN, BATCH_SIZE = 64, 4
BOS, EOS = 0, 1
PACKINGS = ("wrapped", "best_fit")
Piece: TypeAlias = tuple[int, ...]
Options: TypeAlias = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(islice(topics.values(), 20), trainer)
    return made


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Seventy documents of 1 to 400 tokens, all different, an empty one among them."""
    words = " ".join(topics.values()).split()
    sizes = np.random.default_rng(0).integers(1, 40, 70)
    sizes[[3, 30]] = 160
    starts = np.cumsum(sizes) - sizes
    found = [" ".join(words[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
    return [*found[:10], "", *found[10:]]


@pytest.fixture(scope="module")
def options(tokenizer: Tokenizer) -> Options:
    return {
        "tokenizer": tokenizer,
        "seq_len": SEQ_LEN,
        "batch_size": BATCH_SIZE,
        "eos_id": EOS,
    }


def reference(tokenizer: Tokenizer, texts: list[str]) -> list[Piece]:
    """Each document that has tokens, by the tokenizer alone, with its EOS."""
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [(*found, EOS) for found in ids if found]


def segments(batches: Iterable[PackedBatch]) -> list[Piece]:
    """Cuts rows where the segment number changes, in order; padding is left out."""
    found = []
    for batch in batches:
        for row, numbers in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for number in range(1, numbers.max() + 1):
                found.append(tuple(row[numbers == number].tolist()))
    return found


def rejoined(pieces: Iterable[Piece]) -> list[Piece]:
    """Joins pieces in order and cuts them behind each EOS."""
    found: list[Piece] = []
    open_piece: Piece = ()
    for piece in pieces:
        open_piece += piece
        if piece[-1] == EOS:
            found.append(open_piece)
            open_piece = ()
    assert not open_piece
    return found


def assert_equal(got: Sequence[PackedBatch], want: Sequence[PackedBatch]):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_evaluation_gives_every_token_once_in_order(
    texts: list[str], tokenizer: Tokenizer, options: Options
):
    rows = segments(evaluation_batches(texts, **options))
    assert rejoined(rows) == reference(tokenizer, texts)


def test_an_epoch_of_training_gives_every_document_once(
    texts: list[str], tokenizer: Tokenizer, options: Options
):
    rows = segments(training_batches(texts, **options, seed=3, epochs=1))
    found = rejoined(rows)
    assert Counter(found) == Counter(reference(tokenizer, texts))
    assert found != reference(tokenizer, texts)


def test_each_epoch_gives_all_documents_in_an_order_of_its_own(
    texts: list[str], tokenizer: Tokenizer, options: Options
):
    found = rejoined(segments(training_batches(texts, **options, seed=3, epochs=2)))
    first, second = found[:70], found[70:]
    assert Counter(first) == Counter(second) == Counter(reference(tokenizer, texts))
    assert first != second


def test_seeds_one_apart_share_no_epoch(texts: list[str], options: Options):
    one = rejoined(segments(training_batches(texts, **options, seed=0, epochs=2)))
    other = rejoined(segments(training_batches(texts, **options, seed=1, epochs=1)))
    assert one[70:] != other


def test_best_fit_splits_only_what_is_longer_than_a_row(
    texts: list[str], tokenizer: Tokenizer, options: Options
):
    batches = training_batches(texts, **options, seed=3, epochs=1, packing="best_fit")
    want = [
        document[start : start + SEQ_LEN]
        for document in reference(tokenizer, texts)
        for start in range(0, len(document), SEQ_LEN)
    ]
    assert max(map(len, reference(tokenizer, texts))) > 3 * SEQ_LEN
    assert Counter(segments(batches)) == Counter(want)


def test_best_fit_wastes_little(options: Options):
    sizes = np.random.default_rng(0).permutation([20, 44] * 40).tolist()
    texts = ["x" * (size - 1) for size in sizes]
    batches = evaluation_batches(
        texts, **{**options, "tokenizer": letters()}, packing="best_fit"
    )
    assert sum(1 for _ in batches) == 40 // BATCH_SIZE
    assert batches.trace.padding == 0


def letters() -> Tokenizer:
    """Makes each letter a token."""
    vocab = {"<bos>": BOS, "<eos>": EOS, "x": 2, "y": 3}
    return Tokenizer(models.BPE(vocab=vocab, merges=[]))


@pytest.mark.parametrize("packing", PACKINGS)
def test_positions_restart_and_segments_count_up(
    texts: list[str], options: Options, packing: Packing
):
    for batch in evaluation_batches(texts, **options, packing=packing):
        for positions, numbers in zip(
            batch["positions"], batch["segment_ids"], strict=True
        ):
            real = numbers[numbers > 0].tolist()
            assert numbers.tolist() == real + [0] * (SEQ_LEN - len(real))
            assert sorted(set(real)) == list(range(1, max(real, default=0) + 1))
            counts = [real[:at].count(number) for at, number in enumerate(real)]
            assert positions.tolist() == counts + [0] * (SEQ_LEN - len(real))


def test_a_document_across_rows_goes_on_as_a_new_segment(options: Options):
    text = "x" * (SEQ_LEN + 5)
    (batch,) = evaluation_batches([text], **{**options, "tokenizer": letters()})
    assert batch["segment_ids"].sum(axis=1).tolist() == [SEQ_LEN, 6, 0, 0]
    assert batch["positions"][1, :8].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


def test_every_batch_has_one_shape_and_the_tail_is_padding(options: Options):
    texts = ["x" * (SEQ_LEN - 1)] * 5
    batches = list(evaluation_batches(texts, **{**options, "tokenizer": letters()}))
    kinds = {(a.shape, a.dtype.name) for batch in batches for a in batch.values()}
    assert kinds == {((BATCH_SIZE, SEQ_LEN), "int32")}
    assert [batch["segment_ids"].any(axis=1).sum() for batch in batches] == [4, 1]


def test_endless_training_has_no_padding(texts: list[str], options: Options):
    batches = training_batches(texts, **options, seed=0)
    assert all(batch["segment_ids"].all() for batch in islice(batches, 100))


def test_bos_and_eos_frame_whole_documents(options: Options):
    options = {**options, "tokenizer": letters(), "bos_id": BOS}
    (batch,) = evaluation_batches(["xx", "", "y"], **options)
    assert batch["tokens"][0, :8].tolist() == [BOS, 2, 2, EOS, BOS, 3, EOS, 0]
    assert batch["segment_ids"][0, :8].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]


def test_without_eos_and_bos_there_are_only_the_tokens(options: Options):
    options = {**options, "tokenizer": letters(), "eos_id": None}
    (batch,) = evaluation_batches(["xx", "y"], **options)
    assert batch["tokens"][0, :4].tolist() == [2, 2, 3, 0]


def test_a_tokenizer_that_truncates_loses_nothing_here(
    texts: list[str], tokenizer: Tokenizer, options: Options
):
    short = Tokenizer.from_str(tokenizer.to_str())
    short.enable_truncation(5)
    short.enable_padding(length=300)
    rows = segments(evaluation_batches(texts, **{**options, "tokenizer": short}))
    assert rejoined(rows) == reference(tokenizer, texts)
    assert (short.truncation or {})["max_length"] == 5


@pytest.mark.parametrize("packing", PACKINGS)
def test_equal_seeds_give_equal_batches(
    texts: list[str], options: Options, packing: Packing
):
    first, second = (
        list(training_batches(texts, **options, seed=7, epochs=1, packing=packing))
        for _ in range(2)
    )
    assert_equal(first, second)


@pytest.mark.parametrize("packing", PACKINGS)
def test_training_resumes_from_every_position(
    texts: list[str], options: Options, packing: Packing
):
    def start() -> Batches:
        return training_batches(
            texts[:45], **options, seed=5, epochs=2, packing=packing
        )

    batches = start()
    states, whole = [json.dumps(batches.get_state())], []
    for batch in batches:
        whole.append(batch)
        states.append(json.dumps(batches.get_state()))
    assert len(whole) > 15
    for done, state in enumerate(states):
        resumed = start()
        resumed.set_state(json.loads(state))
        assert json.dumps(resumed.get_state()) == state
        assert_equal(list(resumed), whole[done:])


def test_a_running_stream_can_go_back(texts: list[str], options: Options):
    batches = training_batches(texts, **options, seed=5)
    state = batches.get_state()
    first = list(islice(batches, 9))
    batches.set_state(state)
    assert_equal(list(islice(batches, 9)), first)


def test_a_document_of_many_rows_resumes_in_its_middle(options: Options):
    options = {**options, "tokenizer": letters(), "batch_size": 1}
    texts = ["xy" * 300, "y" * 10, "x" * 500]
    whole = list(evaluation_batches(texts, **options))
    batches = evaluation_batches(texts, **options)
    for done in range(len(whole)):
        resumed = evaluation_batches(texts, **options)
        resumed.set_state(json.loads(json.dumps(batches.get_state())))
        assert_equal(list(resumed), whole[done:])
        next(batches)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("count", [2, 4])
def test_shards_make_up_the_global_batch(
    texts: list[str], options: Options, packing: Packing, count: int
):
    def start(shard: tuple[int, int]) -> Batches:
        return training_batches(
            texts, **options, seed=5, epochs=1, packing=packing, shard=shard
        )

    whole = list(start((0, 1)))
    parts = [list(start((index, count))) for index in range(count)]
    joined = [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_equal(joined, whole)


def test_a_run_resumes_with_another_number_of_processes(
    texts: list[str], options: Options
):
    one = training_batches(texts, **options, seed=5)
    next(one)
    second = training_batches(texts, **options, seed=5, shard=(1, 2))
    second.set_state(one.get_state())
    want = next(one)["tokens"][BATCH_SIZE // 2 :]
    np.testing.assert_array_equal(next(second)["tokens"], want)


def test_weights_share_out_the_documents(options: Options):
    options = {**options, "tokenizer": letters(), "eos_id": None}
    batches = training_batches(
        ["x" * 9] * 100, ["y" * 9] * 900, **options, seed=0, weights=(0.75, 0.25)
    )
    tokens = np.concatenate([batch["tokens"] for batch in islice(batches, 9)])
    np.testing.assert_allclose((tokens == 2).mean(), 0.75, atol=9 / tokens.size)


def test_a_weighted_stream_resumes(texts: list[str], options: Options):
    def start() -> Batches:
        return training_batches(
            texts[:30], texts[30:], **options, seed=0, weights=(1.0, 2.0)
        )

    batches = start()
    for _ in range(40):
        next(batches)
    resumed = start()
    resumed.set_state(json.loads(json.dumps(batches.get_state())))
    assert_equal(list(islice(resumed, 5)), list(islice(batches, 5)))


def test_several_sequences_are_one_corpus(texts: list[str], options: Options):
    apart = evaluation_batches(texts[:30], texts[30:], **options)
    assert_equal(list(apart), list(evaluation_batches(texts, **options)))


def test_files_give_what_their_texts_give(
    texts: list[str], options: Options, tmp_path: Path
):
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    documents = open_documents(tmp_path)
    assert_equal(
        list(training_batches(documents, **options, seed=5, epochs=1)),
        list(training_batches(texts, **options, seed=5, epochs=1)),
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_trace_counts_what_was_read(
    texts: list[str], tokenizer: Tokenizer, options: Options, packing: Packing
):
    batches = evaluation_batches(texts, **options, packing=packing)
    numbers = np.concatenate([batch["segment_ids"] for batch in batches])
    rows = numbers[numbers.any(axis=1)]
    trace = batches.trace
    assert trace.documents == len(texts)
    assert trace.tokens == sum(map(len, reference(tokenizer, texts)))
    assert (trace.tokens, trace.padding) == ((rows > 0).sum(), (rows == 0).sum())


def test_the_first_batch_reads_only_the_documents_near_it(options: Options):
    class Counted(UserList[str]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    documents = Counted(["x" * 50] * 100_000)
    next(training_batches(documents, **{**options, "tokenizer": letters()}, seed=0))
    assert documents.reads < 1000


OPTION_FAULTS = [
    ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
    ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ({"shard": (2, 2)}, r"0 <= index < count, got \(2, 2\)"),
    ({"shard": (0, 3)}, "must be a multiple of their number: 4 rows over 3 processes"),
    ({"eos_id": 500}, "eos_id must be one of the tokenizer's 500 tokens, got 500"),
    ({"bos_id": -1}, "bos_id must be one of the tokenizer's 500 tokens, got -1"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"epochs": 0}, "epochs must be at least 1, or None for no end, got 0"),
    ({"weights": (1.0, 2.0)}, "weights must be one positive number for each of the 1"),
    ({"weights": (0.0,)}, r"one positive number .* got \[0.0\]"),
    ({"weights": (1.0,), "epochs": 2}, "give weights or epochs=2, not both"),
    ({"seq_len": 0, "seed": -1}, "seq_len must .*; seed must"),
]


@pytest.mark.parametrize(("wrong", "message"), OPTION_FAULTS)
def test_a_wrong_option_is_named(
    texts: list[str], options: Options, wrong: Options, message: str
):
    with pytest.raises(ValueError, match=message):
        training_batches(texts, **{**options, "seed": 0, **wrong})


DOCUMENT_FAULTS = [
    (("corpus.jsonl",), r"got an address; open it: open_documents\(address\)"),
    ((["", ""],), "nothing to read: 2 documents, and no token in them"),
    (([],), "nothing to read: 0 documents"),
    ((), "nothing to read: 0 documents"),
]


@pytest.mark.parametrize(("documents", "message"), DOCUMENT_FAULTS)
def test_documents_without_text_are_refused(
    options: Options, documents: Any, message: str
):
    with pytest.raises(ValueError, match=message):
        evaluation_batches(*documents, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "seed was 5 and is 6"),
        ({"packing": "best_fit"}, "packing was 'wrapped' and is 'best_fit'"),
        ({"seq_len": 32}, "seq_len was 64 and is 32"),
        ({"eos_id": None}, "tokens was '"),
    ],
)
def test_a_position_of_another_stream_is_refused(
    texts: list[str], options: Options, change: Options, message: str
):
    state = training_batches(texts, **options, seed=5).get_state()
    other = training_batches(texts, **{**options, "seed": 5, **change})
    with pytest.raises(ValueError, match=message):
        other.set_state(state)


def test_a_position_in_other_documents_is_refused(texts: list[str], options: Options):
    state = evaluation_batches(texts, **options).get_state()
    other = evaluation_batches(texts[:-1], **options)
    with pytest.raises(ValueError, match=r"documents was \[71\] and is \[70\]"):
        other.set_state(state)
