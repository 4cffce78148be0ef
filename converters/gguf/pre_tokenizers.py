"""How text is cut into words before bytes merge, by llama.cpp's names.

A name stands for the tokenizer of one model. It is here when the pattern that model
publishes is known; what it is cut by is tested against that pattern, and a name without
one is refused.
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
class Pre:
    """What llama.cpp's name of a pre-tokenizer stands for.

    After `digits` has set every digit apart, `patterns` split the text one after the
    other, or GPT-2's own does where there are none. `whole_words` takes a word that is
    in the vocabulary as it is, whatever the merges say. `bos` is whether a sequence
    starts with BOS if the file does not say. `nfc` composes characters first.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _capitalised(end: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}[{_UPPER}]*[{_LOWER}]+{end}|{start}[{_UPPER}]+[{_LOWER}]*{end}"


_GPT2 = Pre()
_SINGLE_DIGITS = Pre(digits=True)
_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_GPT4 = Pre(patterns=(_THREE_DIGITS,))
_LLAMA3 = Pre(patterns=(_THREE_DIGITS,), whole_words=True, bos=True)

PRE_TOKENIZERS: Mapping[str, Pre] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "exaone4": _GPT2,
    "olmo": Pre(nfc=True),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "command-r": Pre(digits=True, nfc=True),
    "qwen2": Pre(patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _GPT4,
    "smaug-bpe": _GPT4,
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    "gpt-4o": Pre(
        patterns=(
            rf"{_capitalised(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",
        )
    ),
    "tekken": Pre(
        patterns=(rf"{_capitalised('')}|\p{{N}}|{_REST_WITH_SLASH}",),
        whole_words=True,
        bos=True,
    ),
    "falcon": Pre(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]")),
    "bloom": Pre(
        patterns=(r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",)
    ),
    "deepseek-coder": Pre(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
    ),
    "deepseek-v3": Pre(
        patterns=(
            r"\p{N}{1,3}",
            _IDEOGRAPHS_AND_KANA,
            rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
}
"""Pipelines by name."""
