"""Tokenizers from GGUF metadata: byte-level BPE and SentencePiece BPE.

GGUF stores vocabulary and merges but only the *name* of the pre-tokenizer, so each name
needs its pipeline in `pre_tokenizers`; a name without one is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from dew.converters.config.fields import Values
from dew.converters.gguf.pre_tokenizers import PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`, one for each token."""

_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "separator": "sep_token",
    "mask": "mask_token",
}
_MUST_BE_FALSE = {
    "tokenizer.ggml.add_sep_token",
    "tokenizer.ggml.remove_extra_whitespaces",
}
_READ_KEYS = {
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.token_type_count",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.chat_template",
    "tokenizer.chat_templates",
}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens of a GGUF file, with the type of each and all metadata."""

    tokens: list[str]
    types: list[int]
    metadata: Values

    def __post_init__(self) -> None:
        faults = [
            f"{self.tokens[i]!r} is listed twice, first as {ids}"
            for i, ids in self._repeats()
        ]
        if len(self.types) != len(self.tokens):
            faults.append(f"{len(self.types)} token types: {len(self.tokens)} tokens")
        if faults:
            raise ValueError("tokenizer.ggml.tokens: " + "; ".join(faults[:5]))

    def _repeats(self) -> list[tuple[int, int]]:
        first: dict[str, int] = {}
        return [
            (i, first[token])
            for i, token in enumerate(self.tokens)
            if first.setdefault(token, i) != i
        ]

    def ids(self) -> dict[str, int]:
        """Returns the id of each token, without rows that only pad the embedding."""
        return {
            token: i
            for i, token in enumerate(self.tokens)
            if not (self.types[i] == UNUSED and token == f"[PAD{i}]")
        }

    def added_tokens(self) -> dict[int, AddedToken]:
        """Returns the tokens that are matched in the text before it is split."""
        return {
            i: AddedToken(
                self.tokens[i], special=kind != USER_DEFINED, normalized=False
            )
            for i, kind in enumerate(self.types)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        }


def tokenizer_files(metadata: Values, *, length: int) -> dict[str, str]:
    """Builds tokenizer.json and its two side files; none if the file has no tokenizer.

    `length` is the longest sequence that the model takes, in tokens.

    Raises:
        ValueError: the name of the tokenizer or of its pre-tokenizer is unknown, or
            the metadata hold a tokenizer setting that is not read here.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return {}
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ValueError(
            f"tokenizer.ggml.model must be one of {', '.join(builders)}, got {kind!r}"
        )
    _check_keys(metadata)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    vocabulary = Vocabulary(
        tokens=tokens,
        types=list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))),
        metadata=metadata,
    )
    tokenizer = builders[kind](vocabulary)
    tokenizer.add_tokens(list(vocabulary.added_tokens().values()))
    special = _special_tokens(vocabulary)
    config = {
        **special,
        "added_tokens_decoder": {
            str(i): {
                "content": token.content,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token.special,
            }
            for i, token in vocabulary.added_tokens().items()
        },
        **_chat_template(metadata),
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
        # A model's own class would make transformers build another pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
        "special_tokens_map.json": json.dumps(special, indent=2, ensure_ascii=False),
    }


def _check_keys(metadata: Values) -> None:
    unread = [
        f"{key} = {metadata[key]!r}"[:100]
        for key in metadata
        if key.startswith("tokenizer.")
        and key not in _READ_KEYS
        and not key.endswith(("_token_id", "_token_ids"))
        and not key.startswith("tokenizer.chat_template.")
        and not (key in _MUST_BE_FALSE and metadata[key] is False)
    ]
    if unread:
        raise ValueError("tokenizer settings not accounted for: " + ", ".join(unread))


def _special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    ids = {
        field: vocabulary.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name, field in _NAMES.items()
    }
    return {
        field: vocabulary.tokens[i]
        for field, i in ids.items()
        if i is not None and i < len(vocabulary.tokens)
    }


def _chat_template(metadata: Values) -> dict[str, Any]:
    prefix = "tokenizer.chat_template."
    templates = [
        {"name": key.removeprefix(prefix), "template": value}
        for key, value in metadata.items()
        if key.startswith(prefix)
    ]
    default = metadata.get("tokenizer.chat_template")
    if not templates:
        return {} if default is None else {"chat_template": default}
    if default is not None:
        templates.insert(0, {"name": "default", "template": default})
    return {"chat_template": templates}


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}, "
            f"got {name!r}"
        )
    pipeline = PRE_TOKENIZERS[name]
    merges = [
        tuple(merge.split(" "))
        for merge in vocabulary.metadata["tokenizer.ggml.merges"]
    ]
    if odd := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"tokenizer.ggml.merges must hold pairs, got {odd[:3]}")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(), merges=merges, ignore_merges=pipeline.ignore_merges
        )
    )
    if pipeline.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pipeline.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    # ByteLevel has GPT-2's pattern built in, which would split words once more.
    is_gpt2 = not pipeline.patterns
    steps += [pre_tokenizers.Split(Regex(p), "isolated") for p in pipeline.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_bos_eos(tokenizer, vocabulary, bos=pipeline.bos)
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Builds SentencePiece's BPE: merges are ordered by the score of their result.

    Merges sorted by score alone reproduce SentencePiece; putting those of whitespace
    first, as some converters do, changes the ids of indented text.
    """
    ids = vocabulary.ids()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges_by_score(vocabulary, ids),
            unk_token=_special_tokens(vocabulary).get("unk_token"),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    # The first word has a space like all others: added here, stripped by the decoder.
    is_prefixed = vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if is_prefixed else []
    strip = [decoders.Strip(" ", 1, 0)] if is_prefixed else []
    tokenizer.normalizer = normalizers.Sequence(
        [*prefix, normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *strip,
        ]
    )
    _add_bos_eos(tokenizer, vocabulary, bos=True)
    return tokenizer


def _merges_by_score(
    vocabulary: Vocabulary, ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    scores = vocabulary.metadata["tokenizer.ggml.scores"]
    # Only tokens that text can spell merge: control tokens are matched before.
    normal = {
        token: i for token, i in ids.items() if vocabulary.types[i] in (NORMAL, UNUSED)
    }
    ranked = sorted(normal, key=lambda token: (-scores[ids[token]], ids[token]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]


def _add_bos_eos(tokenizer: Tokenizer, vocabulary: Vocabulary, *, bos: bool) -> None:
    """Makes the tokenizer add BOS and EOS as the file, or its type, has it."""
    metadata, tokens = vocabulary.metadata, _special_tokens(vocabulary)
    is_added = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    frame = {f: tokens[f] for f, is_on in is_added.items() if is_on and f in tokens}
    if not frame:
        return
    start, end = frame.get("bos_token"), frame.get("eos_token")
    # ":1" is the type id of a pair's second sequence, which its BOS and EOS share.
    single = [part for part in (start, "$A", end) if part]
    pair = [
        part for part in (start and f"{start}:1", "$B:1", end and f"{end}:1") if part
    ]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *pair],
        special_tokens=[
            (token, vocabulary.tokens.index(token)) for token in set(frame.values())
        ],
    )
