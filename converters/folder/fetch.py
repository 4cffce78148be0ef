"""Downloads of folders from the Hugging Face hub and from fsspec's file systems."""

import hashlib
import json
import re
from pathlib import Path

import fsspec
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from dew.converters.folder.cache import cache_folder

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?/(.+\.gguf)")


_HUB_FILES = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.tiktoken",
    "*.md",
    "LICENSE*",
    "NOTICE*",
)


_PICKLES = ("pytorch_model*.bin",)


def download_hub(name: str, address: str) -> Path:
    """Downloads a repository's config, tokenizer and weights, or one .gguf file.

    `name` is `org/name`, `org/name@revision` or `org/name/file.gguf`; `address` is what
    the user wrote, for messages. Pickled weights are downloaded only where there are
    no safetensors.

    Raises:
        ValueError: the hub does not have it, or cannot be reached.
    """
    file = _HUB_GGUF.fullmatch(name)
    repository, _, revision = name.rstrip("/").partition("@")

    def fetch(*patterns: str) -> Path:
        folder = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(patterns),
            ignore_patterns=["original/*", "onnx/*"],
        )
        return Path(folder)

    try:
        if file:
            return Path(hf_hub_download(file[1], file[3], revision=file[2]))
        folder = fetch(*_HUB_FILES)
        # Pickles double the download where there are safetensors as well.
        return folder if any(folder.glob("*.safetensors")) else fetch(*_PICKLES)
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OSError,
    ) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{address} is neither here nor to be had from the hub: {reason}"
        ) from error


def download_url(address: str) -> Path:
    """Copies a remote folder, or one file, into the cache, and returns the copy.

    Files whose checksum is unchanged are not downloaded again.

    Raises:
        ValueError: the address cannot be listed, or holds no files.
    """
    # fsspec's `filecache` would not do: it keeps files that were removed at the source,
    # so a stale shard would stay in the folder, and with `same_names` it puts the files
    # of nested folders into one.
    try:
        files, root = fsspec.core.url_to_fs(address)
        remote = [file for file in files.find(root) if not _is_hidden(file, root)]
    except (ValueError, ImportError, OSError) as error:
        raise ValueError(f"{address} cannot be listed: {error}") from error
    if not remote:
        raise ValueError(f"{address} holds no files")
    target = cache_folder() / hashlib.sha256(address.encode()).hexdigest()[:16]
    target.mkdir(parents=True, exist_ok=True)
    note = target / ".fetched.json"
    old_marks = json.loads(note.read_text()) if note.exists() else {}
    marks = {}
    for file in remote:
        name = file.removeprefix(root).lstrip("/") or Path(root).name
        marks[name] = str(files.checksum(file))
        if old_marks.get(name) != marks[name] or not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            partial = target / f"{name}.partial"
            files.get_file(file, str(partial))
            partial.replace(target / name)
    for name in set(old_marks) - set(marks):
        (target / name).unlink(missing_ok=True)
    note.write_text(json.dumps(marks))
    return target / Path(root).name if remote == [root] else target


def _is_hidden(file: str, root: str) -> bool:
    return any(part.startswith(".") for part in file.removeprefix(root).split("/"))
