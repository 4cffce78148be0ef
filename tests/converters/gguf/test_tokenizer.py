"""Tokenizers from GGUF metadata, against the algorithms written out plainly."""

import json
import pydoc_data.topics
import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dew.converters.gguf.pre_tokenizers import PRE_TOKENIZERS
from dew.converters.gguf.tokenizer import tokenizer_files

TEXT = "\n".join(pydoc_data.topics.topics[name] for name in ("if", "numbers", "lists"))
SAMPLES = [
    "x =  2",
    "\n\n2 \n 33 4444",
    "I'VE said they're it's, 'tis ½ x² 3.14",
    "    if a:\r\n\treturn  b\n\n\n",
    "日本語 émigré 🚀\u200d naïve\u00a0x",
    "...!!! --- == ``",
    "cafe\u0301 e\u0301te\u0301",
    "12345 1234567 漢字かなカナ 한국어 (a|b) `x` $5+3=8 .net #tag a/b\n/c\r\n",
    "HTMLParser fooBar ΑΒγδ (see: x), \u0939\u093f\u0928\u094d\u0926\u0940\u0964 x",
    TEXT[:2000],
]

# The patterns as the tokenizers that the names stand for publish them.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = (r"\p{N}", GPT2)
GPT4 = (rf"{HEAD}|\p{{N}}{{1,3}}|{TAIL}",)
PATTERNS = {
    **dict.fromkeys(["gpt-2", "phi-2", "mpt", "exaone4", "olmo"], (GPT2,)),
    **dict.fromkeys(["smollm", "starcoder", "refact", "codeshell"], DIGITS),
    **dict.fromkeys(["exaone", "command-r"], DIGITS),
    "qwen2": [rf"{HEAD}|\p{{N}}|{TAIL}"],
    **dict.fromkeys(["llama-bpe", "llama3", "llama-v3"], GPT4),
    **dict.fromkeys(["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], GPT4),
    "gpt-4o": [
        CASED + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [TEKKEN],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "bloom": [" ?[^(\\s|.,!?…。，、।۔،)]+"],  # noqa: RUF001
    "deepseek-coder": [
        "[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}",
    ],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK_V3],
}
COMPOSING = {"qwen2", "command-r", "olmo"}


def byte_letters() -> dict[int, str]:
    """GPT-2's letters for bytes: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


def merged(parts: Iterable[str], rank: dict[tuple[str, str], float]) -> list[str]:
    """Joins the pair of the lowest rank, the leftmost first, until none is left."""
    parts = list(parts)
    while True:
        ranks = [rank.get(pair, float("inf")) for pair in pairwise(parts)]
        if not ranks or min(ranks) == float("inf"):
            return parts
        at = ranks.index(min(ranks))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """The metadata of a byte-level BPE of some 650 tokens and one control token."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=alphabet, show_progress=False
        ),
    )
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    padding = f"[PAD{len(tokens) + 1}]"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "<|end|>", padding],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }


def built(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata, length=10)["tokenizer.json"])


def words(text: str, patterns: Iterable[str]) -> list[str]:
    """Cuts by one pattern after the other; what stands between matches is kept."""
    pieces = [text]
    for pattern in patterns:
        cut = [regex.splititer(f"({pattern})", piece) for piece in pieces]
        pieces = [found for parts in cut for found in parts if found]
    return pieces


@pytest.mark.parametrize("pre", PATTERNS)
def test_a_named_pre_tokenizer_splits_as_its_published_pattern(
    pre: str, byte_level: dict[str, Any]
) -> None:
    tokenizer = built(byte_level | {"tokenizer.ggml.pre": pre})
    merges = byte_level["tokenizer.ggml.merges"]
    rank = {tuple(merge.split(" ")): float(i) for i, merge in enumerate(merges)}
    letters = byte_letters()
    composed = pre in COMPOSING
    for sample in SAMPLES:
        text = unicodedata.normalize("NFC", sample) if composed else sample
        spelled = [
            "".join(letters[b] for b in w.encode()) for w in words(text, PATTERNS[pre])
        ]
        want = [part for word in spelled for part in merged(word, rank)]
        assert tokenizer.encode(sample).tokens == want
        assert tokenizer.decode(tokenizer.encode(sample).ids) == text


def test_every_pre_tokenizer_is_held_to_a_pattern() -> None:
    assert PRE_TOKENIZERS.keys() == PATTERNS.keys()


def test_llama_3_takes_a_word_it_knows_whole(byte_level: dict[str, Any]) -> None:
    tokens = [
        "Zyx" if t == "<|end|>" else t for t in byte_level["tokenizer.ggml.tokens"]
    ]
    kinds = [1] * (len(tokens) - 1) + [5]
    known = byte_level | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    whole = built(known | {"tokenizer.ggml.pre": "llama-bpe"})
    assert whole.encode("Zyx").tokens == ["Zyx"]
    assert built(known).encode("Zyx").tokens == ["Z", "y", "x"]


def test_control_tokens_are_found_in_text_and_padding_rows_never(
    byte_level: dict[str, Any],
) -> None:
    tokenizer = built(byte_level)
    end, padding = byte_level["tokenizer.ggml.tokens"][-2:]
    ids = tokenizer.encode(f"a{end}{padding}").ids
    assert ids[1] == byte_level["tokenizer.ggml.eos_token_id"]
    assert tokenizer.token_to_id(padding) is None
    assert tokenizer.decode(ids) == f"a{padding}"


@pytest.mark.parametrize(("key", "at"), [("add_bos_token", 0), ("add_eos_token", -1)])
def test_a_sequence_is_framed_as_the_file_says(
    key: str, at: int, byte_level: dict[str, Any]
) -> None:
    end = byte_level["tokenizer.ggml.eos_token_id"]
    framed = built(
        byte_level | {"tokenizer.ggml.bos_token_id": end, f"tokenizer.ggml.{key}": True}
    )
    bare = built(byte_level).encode("def f").ids
    got = framed.encode("def f").ids
    assert got[at] == end
    assert len(got) == len(bare) + 1


SPM_WORDS = ["▁", "▁a", "ab", "▁ab", "b", "a", "c", "bc", "▁▁", "▁▁▁▁", "abc", "cc"]


@pytest.fixture
def sentencepiece() -> dict[str, Any]:
    """The metadata of a SentencePiece BPE with bytes to fall back on."""
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *data, *SPM_WORDS]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_WORDS),
        "tokenizer.ggml.scores": [0.0] * 259
        + [-float(i) for i in range(len(SPM_WORDS))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize(
    "text", ["ab", "a  b", "abc cc", "    abcc  a", "aé🚀b", "bbbb"]
)
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(
    text: str, prefix: bool, sentencepiece: dict[str, Any]
) -> None:
    metadata = sentencepiece | {"tokenizer.ggml.add_space_prefix": prefix}
    score = {word: float(i) for i, word in enumerate(SPM_WORDS)}
    rank = {(w[:i], w[i:]): s for w, s in score.items() for i in range(1, len(w))}
    spaced = ("▁" if prefix else "") + text.replace(" ", "▁")
    want = ["<s>"]
    for part in merged(spaced, rank):
        bytes_of = [f"<0x{byte:02X}>" for byte in part.encode()]
        want += [part] if part in score else bytes_of
    tokenizer = built(metadata)
    assert tokenizer.encode(text).tokens == want
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer.ggml.pre": "viking"}, "pre must be one of gpt-2.*got 'viking'"),
        ({"tokenizer.ggml.model": "t5"}, "model must be one of gpt2, llama, got 't5'"),
        ({"tokenizer.ggml.new": 1}, r"not accounted for: tokenizer\.ggml\.new = 1"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "must hold pairs"),
        ({"tokenizer.ggml.token_type": [1]}, r"1 token types: \d{3} tokens"),
    ],
)
def test_what_would_tokenize_otherwise_is_refused(
    changes: dict[str, Any], told: str, byte_level: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=told):
        tokenizer_files(byte_level | changes, length=10)


def test_a_token_that_stands_twice_is_refused(byte_level: dict[str, Any]) -> None:
    tokens = [*byte_level["tokenizer.ggml.tokens"][:-1], "a"]
    with pytest.raises(ValueError, match="'a' is listed twice, first as "):
        built(byte_level | {"tokenizer.ggml.tokens": tokens})


def test_transformers_keeps_the_pipeline_and_the_chat_template(
    byte_level: dict[str, Any], tmp_path: Any
) -> None:
    import transformers

    metadata = byte_level | {
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.chat_template": "{{ messages[0].content }}<|end|>",
    }
    for name, content in tokenizer_files(metadata, length=10).items():
        (tmp_path / name).write_text(content)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("if  2").input_ids == built(metadata).encode("if  2").ids
    assert loaded.eos_token == "<|end|>"
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "hi<|end|>"
