"""Pre-tokenizers of byte-level BPE, by llama.cpp's names.

A pre-tokenizer cuts text into words within which bytes merge. A name is listed if the
model that it is named after publishes its pattern, against which it is tested; other
names are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_REST_WITH_SLASH = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT2_WORDS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
_IDEOGRAPHS = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_IDEOGRAPHS_AND_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Steps from text to words.

    Attributes:
        patterns: regular expressions that split the text one after the other; GPT-2's
            own if empty.
        single_digits: whether every digit is split off first.
        ignore_merges: whether a word in the vocabulary is one token whatever the
            merges are.
        bos: whether a sequence starts with BOS if the file does not state it.
        nfc: whether characters are composed before anything else.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    ignore_merges: bool = False
    bos: bool = False
    nfc: bool = False


_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased_words(end: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}[{_UPPER}]*[{_LOWER}]+{end}|{start}[{_UPPER}]+[{_LOWER}]*{end}"


_GPT2 = Pipeline()
_SINGLE_DIGITS = Pipeline(single_digits=True)
_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_GPT4 = Pipeline(patterns=(_THREE_DIGITS,))
_LLAMA3 = Pipeline(patterns=(_THREE_DIGITS,), ignore_merges=True, bos=True)

PRE_TOKENIZERS: Mapping[str, Pipeline] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "exaone4": _GPT2,
    "olmo": Pipeline(nfc=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "command-r": Pipeline(single_digits=True, nfc=True),
    "qwen2": Pipeline(
        patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), nfc=True
    ),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _GPT4,
    "smaug-bpe": _GPT4,
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    "gpt-4o": Pipeline(
        patterns=(
            rf"{_cased_words(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",
        )
    ),
    "tekken": Pipeline(
        patterns=(rf"{_cased_words('')}|\p{{N}}|{_REST_WITH_SLASH}",),
        ignore_merges=True,
        bos=True,
    ),
    "falcon": Pipeline(
        patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]")
    ),
    "bloom": Pipeline(
        patterns=(r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)
    ),
    "deepseek-coder": Pipeline(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
    ),
    "deepseek-v3": Pipeline(
        patterns=(
            r"\p{N}{1,3}",
            _IDEOGRAPHS_AND_KANA,
            rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
}
"""Pipelines by the value of `tokenizer.ggml.pre`."""
