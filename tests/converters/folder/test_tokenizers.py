"""Tokenizers of folders as they stand on disk, against those of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

import dew
from dew.converters.folder.folder import Folder
from dew.data.tokenize import template_prefix
from tests.support import hf_models as hf

TEXTS = (
    "a bad cab",
    "<s> a <extra> b</s>",
    "ab<tool>ba <tool> cab",
    " <|end|>abc<|end|> ",
    "<pad><pad>abc",
)

BASE = ("<unk>", "<s>", "</s>")
"""Tokens that tokenizer.json itself adds."""


def bytes_tokenizer(*added: str, prefix: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer of few merges, as those of GPT-2 and Llama 3 are."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*BASE, *letters, "ab", "ca", "Ġa"))}
    merges = [("a", "b"), ("c", "a"), ("Ġ", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if prefix:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    tokenizer.add_special_tokens(list(added))
    return tokenizer


def token(content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "normalized", "rstrip", "single_word", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


FILES: Mapping[str, Mapping[str, Any]] = {
    "nothing but tokenizer.json": {},
    "named special tokens alone": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "pad_token": "<pad>"}
    },
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "1": token("<s>", special=True),
                "300": token("<tool>", lstrip=True),
                "299": token("<extra>", rstrip=True, special=True),
            },
            "eos_token": "</s>",
        }
    },
    "added_tokens.json": {
        "added_tokens.json": {"<tool>": 263, "<extra>": 262},
        "special_tokens_map.json": {
            "bos_token": "<s>",
            "eos_token": token("</s>"),
            "additional_special_tokens": ["<extra>"],
        },
        "tokenizer_config.json": {},
    },
    "extra special tokens": {
        "tokenizer_config.json": {
            "eos_token": "</s>",
            "extra_special_tokens": ["<tool>", "<|end|>"],
        }
    },
    "an older list of them": {
        "tokenizer_config.json": {
            "eos_token": "</s>",
            "additional_special_tokens": ["<tool>", "<|end|>"],
        }
    },
    "a template with both ends": {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "add_eos_token": True,
        }
    },
    "a template without": {
        "tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": False}
    },
}
"""Files beside tokenizer.json, by what is told in them."""


def folder_of(path: Path, tokenizer: Tokenizer, files: Mapping[str, Any]) -> Folder:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in {"tokenizer_config.json": {}, **files}.items():
        is_settings = name == "tokenizer_config.json"
        text = json.dumps({**(settings if is_settings else {}), **content})
        (path / name).write_text(text)
    return Folder(path=path, address=str(path))


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_ids_are_those_of_transformers(
    name: str, template: bool, tmp_path: Path
) -> None:
    tokenizer = bytes_tokenizer("<s>", "</s>", prefix=template)
    folder = folder_of(tmp_path, tokenizer, FILES[name])
    ours, theirs = folder.tokenizer, AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    for text in TEXTS:
        for special in (True, False):
            got = ours.encode(text, add_special_tokens=special).ids
            assert got == theirs(text, add_special_tokens=special).input_ids, text
        ids = theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.get_vocab(with_added_tokens=True) == theirs.get_vocab()
    added = ours.get_added_tokens_decoder()
    assert {i: repr(t) for i, t in added.items()} == {
        i: repr(t) for i, t in theirs.added_tokens_decoder.items()
    }
    if theirs.eos_token_id is not None:
        assert folder_with_config(folder).eos_ids == (theirs.eos_token_id,)


def folder_with_config(folder: Folder) -> Folder:
    (folder.path / "config.json").write_text("{}")
    return folder


def test_stored_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer("<s>", "</s>")
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=16, pad_id=0, pad_token="<unk>")
    ours = folder_of(tmp_path, tokenizer, {}).tokenizer
    assert ours is not None
    ids = ours.encode("abcabcabc").ids
    assert len(ids) > 4
    assert 0 not in ids
    plain = folder_of(tmp_path / "plain", bytes_tokenizer("<s>", "</s>"), {}).tokenizer
    assert plain is not None
    assert ours.to_str() == plain.to_str()


def test_an_extended_folder_keeps_what_its_tokenizer_stores(tmp_path: Path) -> None:
    folder = hf.save(hf.llama(), tmp_path / "model")
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.enable_truncation(max_length=4)
    tokenizer.save(file)
    grown = dew.extend_vocabulary(dew.load(folder), ["<call>"], tmp_path / "grown")
    stored = Tokenizer.from_file(str(grown / "tokenizer.json"))
    assert stored.truncation is not None
    assert stored.truncation["max_length"] == 4
    assert stored.token_to_id("<call>") is not None


def test_end_tokens_are_taken_in_the_order_of_transformers(tmp_path: Path) -> None:
    settings = {"tokenizer_config.json": {"eos_token": "</s>"}}
    ends: list[tuple[int, ...]] = []
    for config, generation in (
        ({}, {}),
        ({"eos_token_id": 7}, {}),
        ({"eos_token_id": 7}, {"eos_token_id": None}),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}),
    ):
        folder = folder_of(tmp_path, bytes_tokenizer("<s>", "</s>"), settings)
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        ends.append(folder.eos_ids)
    assert ends == [(2,), (7,), (7,), (8, 9)]


def test_the_prefix_of_a_template_is_what_stands_before_a_text() -> None:
    assert template_prefix(bytes_tokenizer("<s>", "</s>")) == ()
    assert template_prefix(bytes_tokenizer("<s>", "</s>", prefix=True)) == (1,)
    two = bytes_tokenizer("<s>", "</s>")
    two.post_processor = processors.TemplateProcessing(
        single="</s> <s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert template_prefix(two) == (2, 1)
