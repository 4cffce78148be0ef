"""Tokenizers from GGUF metadata: byte-level BPE by name, and SentencePiece BPE.

GGUF stores vocabulary and merges but only the *name* of the pre-tokenizer, so each name
needs its pipeline here; a name without one is refused.
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

from dew.converters.gguf.pre_tokenizers import PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""What `tokenizer.ggml.token_type` says of a token."""

_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "separator": "sep_token",
    "mask": "mask_token",
}
_OFF = {"tokenizer.ggml.add_sep_token", "tokenizer.ggml.remove_extra_whitespaces"}
_KEYS = {
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
    """The tokens of a GGUF file with what it says about each."""

    tokens: list[str]
    kinds: list[int]
    metadata: Mapping[str, Any]

    def __post_init__(self) -> None:
        faults = [
            f"{self.tokens[i]!r} stands twice, first as {ids}"
            for i, ids in self._repeated()
        ]
        if len(self.kinds) != len(self.tokens):
            faults.append(f"{len(self.kinds)} token types: {len(self.tokens)} tokens")
        if faults:
            raise ValueError("tokenizer.ggml.tokens: " + "; ".join(faults[:5]))

    def _repeated(self) -> list[tuple[int, int]]:
        first: dict[str, int] = {}
        return [
            (i, first[token])
            for i, token in enumerate(self.tokens)
            if first.setdefault(token, i) != i
        ]

    def ids(self) -> dict[str, int]:
        """Returns the vocabulary, without the rows that only pad the embedding."""
        return {
            token: i
            for i, token in enumerate(self.tokens)
            if not (self.kinds[i] == UNUSED and token == f"[PAD{i}]")
        }

    def added(self) -> dict[int, AddedToken]:
        """Returns the tokens that are found in the text before anything else."""
        return {
            i: AddedToken(
                self.tokens[i], special=kind != USER_DEFINED, normalized=False
            )
            for i, kind in enumerate(self.kinds)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        }


def tokenizer_files(metadata: Mapping[str, Any], *, length: int) -> dict[str, str]:
    """Builds tokenizer.json and its two side files; none if the file has no tokenizer.

    `length` is the longest sequence the model takes.

    Raises:
        ValueError: the tokenizer or its pre-tokenizer is unknown by name, or the
            metadata holds a tokenizer setting that nothing here reads.
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
        kinds=list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))),
        metadata=metadata,
    )
    tokenizer = builders[kind](vocabulary)
    tokenizer.add_tokens(list(vocabulary.added().values()))
    named = _named(vocabulary)
    config = {
        **named,
        "added_tokens_decoder": {
            str(i): {
                "content": token.content,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token.special,
            }
            for i, token in vocabulary.added().items()
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
        "special_tokens_map.json": json.dumps(named, indent=2, ensure_ascii=False),
    }


def _check_keys(metadata: Mapping[str, Any]) -> None:
    strange = [
        f"{key} = {metadata[key]!r}"[:100]
        for key in metadata
        if key.startswith("tokenizer.")
        and key not in _KEYS
        and not key.endswith(("_token_id", "_token_ids"))
        and not key.startswith("tokenizer.chat_template.")
        and not (key in _OFF and metadata[key] is False)
    ]
    if strange:
        raise ValueError("tokenizer settings not accounted for: " + ", ".join(strange))


def _named(vocabulary: Vocabulary) -> dict[str, str]:
    ids = {
        field: vocabulary.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name, field in _NAMES.items()
    }
    return {
        field: vocabulary.tokens[i]
        for field, i in ids.items()
        if i is not None and i < len(vocabulary.tokens)
    }


def _chat_template(metadata: Mapping[str, Any]) -> dict[str, Any]:
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
    pre = PRE_TOKENIZERS[name]
    merges = [
        tuple(merge.split(" "))
        for merge in vocabulary.metadata["tokenizer.ggml.merges"]
    ]
    if odd := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"tokenizer.ggml.merges must hold pairs, got {odd[:3]}")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=pre.whole_words)
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    is_gpt2 = not pre.patterns
    steps += [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _frame(tokenizer, vocabulary, bos=pre.bos)
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Builds SentencePiece's BPE: the merge that makes the best-scored piece is first.

    Merges sorted by score alone reproduce SentencePiece; putting those of whitespace
    first, as some converters do, changes the ids of indented text.
    """
    ids = vocabulary.ids()
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges_by_score(vocabulary, ids),
            unk_token=_named(vocabulary).get("unk_token"),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        )
    )
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
    _frame(tokenizer, vocabulary, bos=True)
    return tokenizer


def _merges_by_score(
    vocabulary: Vocabulary, ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    scores = vocabulary.metadata["tokenizer.ggml.scores"]
    normal = {
        token: i for token, i in ids.items() if vocabulary.kinds[i] in (NORMAL, UNUSED)
    }
    ranked = sorted(normal, key=lambda token: (-scores[ids[token]], ids[token]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]


def _frame(tokenizer: Tokenizer, vocabulary: Vocabulary, *, bos: bool) -> None:
    """Makes the tokenizer add BOS and EOS where the file, or its kind, says so."""
    metadata, named = vocabulary.metadata, _named(vocabulary)
    wanted = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    frame = {f: named[f] for f, is_on in wanted.items() if is_on and f in named}
    if not frame:
        return
    start, end = frame.get("bos_token"), frame.get("eos_token")
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
