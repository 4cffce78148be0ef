"""The tokenizer of a folder, as transformers builds it from all of its files.

Truncation and padding that tokenizer.json stores are settings of a past call, and are
left out: whoever wants them applies them.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from dew.converters.folder.json_files import read_json

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
NAMES, ADDED = "special_tokens_map.json", "added_tokens.json"

SPECIAL = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token"),
    *("cls_token", "mask_token"),
)
"""Names under which a folder's settings state special tokens."""


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer of a folder; None where it has no tokenizer.json.

    Tokens that only `added_tokens_decoder`, added_tokens.json or the named special
    tokens state are added with the ids and flags that transformers gives them. As
    there, the template of tokenizer.json counts, whatever `add_bos_token` says.

    Raises:
        ValueError: a file is no tokenizer, or states tokens in another form.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        # The package raises nothing more special.
        raise ValueError(f"{file} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _settings(folder)
    try:
        stated = _added_tokens(folder, settings)
        named = _named_tokens(settings)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(
            f"the added tokens of {folder / SETTINGS} cannot be read: {error}"
        ) from error
    _add(tokenizer, stated, named)
    return tokenizer


def special_id(folder: Path, tokenizer: Tokenizer | None, name: str) -> int | None:
    """Returns the id of a token that a folder names: `eos_token`, `bos_token`."""
    token = _settings(folder).get(name)
    if tokenizer is None or token is None:
        return None
    return tokenizer.token_to_id(_text(token))


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the tokenizer's settings, with the special tokens of the older file.

    A folder with `added_tokens_decoder` has all of them in tokenizer_config.json.
    """
    settings = read_json(folder / SETTINGS)
    if "added_tokens_decoder" in settings:
        return settings
    return settings | read_json(folder / NAMES)


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[AddedToken]:
    """Returns the tokens that the folder adds to tokenizer.json, by their ids."""
    decoder = settings.get("added_tokens_decoder")
    if decoder is not None:
        own = {_text(settings[name]) for name in SPECIAL if settings.get(name)}
        by_id = {
            int(index): _token(
                token, special=bool(token.get("special")) or _text(token) in own
            )
            for index, token in decoder.items()
        }
        return [by_id[index] for index in sorted(by_id)]
    # Not those of the older list of additional ones, in transformers neither.
    names = (*SPECIAL, "extra_special_tokens")
    named = {name: settings[name] for name in names if name in settings}
    special = {_text(token) for token in _named_tokens(named)}
    added = read_json(folder / ADDED)
    return [
        AddedToken(text, normalized=text not in special, special=text in special)
        for text, _ in sorted(added.items(), key=lambda item: item[1])
    ]


def _named_tokens(settings: Mapping[str, Any]) -> list[Any]:
    """Returns the special tokens that settings name, as texts or as dicts."""
    named = [settings[name] for name in SPECIAL if settings.get(name) is not None]
    for name in ("extra_special_tokens", "additional_special_tokens"):
        extra = settings.get(name) or ()
        named += extra.values() if isinstance(extra, Mapping) else extra
    return named


def _add(tokenizer: Tokenizer, stated: list[AddedToken], named: Iterable[Any]) -> None:
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = {token.content: token for token in stated if token.content not in known}
    for token in named:
        if _text(token) not in known:
            new.setdefault(_text(token), _token(token, special=True))
    tokenizer.add_tokens(list(new.values()))


def _token(token: Any, **flags: bool) -> AddedToken:
    """Returns a token with its stated flags, of which `flags` replace some."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    stated = {n: token[n] for n in names if n in token} if _is_dict(token) else {}
    return AddedToken(_text(token), **{**stated, **flags})


def _is_dict(token: object) -> bool:
    return isinstance(token, Mapping)


def _text(token: Any) -> str:
    return str(token["content"] if _is_dict(token) else token)
