"""Flags and files of a command, checked before any model is loaded.

Each function returns its faults as messages. A command collects all of them and raises
once, so that a slip in a flag does not cost the minutes that a model takes to load, and
two slips do not cost two attempts.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fsspec.core import url_to_fs
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from dew import api
from dew.converters.families import FAMILIES
from dew.converters.families.base import is_trunk
from dew.converters.folder.atomic import check_free
from dew.converters.folder.fetch import HUB_ID
from dew.converters.folder.folder import Folder, bin_files
from dew.converters.load import unsupported
from dew.converters.lora.peft import base_address
from dew.converters.open_folder import open_folder
from dew.data.documents import unlistable
from dew.runs import RunFolder

HUB_TIMEOUT_S = 10
"""Seconds that the hub has to say whether it has a model."""


def refuse(faults: Sequence[str]) -> None:
    """Raises one error for all faults, if there are any.

    Raises:
        ValueError: there are faults; the message has them all.
    """
    if faults:
        raise ValueError("; ".join(faults))


def flag(name: str) -> str:
    """Returns a field's flag on the command line: `seq_len` is `--seq-len`."""
    return f"--{name.replace('_', '-')}"


def too_small(flags: object, least: int, *names: str) -> list[str]:
    """Returns a message for each number of a command that is below `least`."""
    values = {name: getattr(flags, name) for name in names}
    return [
        f"{flag(name)} must be at least {least}, got {value:g}"
        for name, value in values.items()
        if value is not None and not value >= least
    ]


def not_positive(flags: object, *names: str) -> list[str]:
    """Returns a message for each number of a command that is not finite and above 0."""
    values = {name: getattr(flags, name) for name in names}
    return [
        f"{flag(name)} must be a number above 0, got {value:g}"
        for name, value in values.items()
        if not (value > 0 and math.isfinite(value))
    ]


def text_faults(name: str, addresses: Sequence[str]) -> list[str]:
    """Returns what is wrong with a flag's text files, without reading them."""
    if not addresses:
        return [f"{name} names no file or folder"]
    return [f"{name}: {fault}" for fault in unlistable(*addresses)]


def output_faults(folder: Path) -> list[str]:
    """Returns why a folder cannot be written to, where it cannot."""
    try:
        check_free(folder.expanduser().absolute(), overwrite=False)
    except ValueError as fault:
        return [str(fault)]
    return []


def model_faults(
    name: str,
    address: str,
    *,
    road: api.Road = "auto",
    ignore_fields: Sequence[str] = (),
    needs_tokenizer: bool = False,
    needs_weights: bool = True,
    needs_head: bool = False,
    seq_len: int | None = None,
) -> list[str]:
    """Returns what is wrong with a model's address or its folder, before its weights.

    Args:
        name: the flag, for the messages.
        address: the folder, hub id, URL or run.
        road: the way it is to be loaded; its own family or torch must be there.
        ignore_fields: fields of config.json that are to be ignored.
        needs_tokenizer: whether the command reads text with its tokenizer.
        needs_weights: whether the model itself is loaded, and not its tokenizer alone.
        needs_head: whether the command reads text and the model's logits.
        seq_len: number of tokens of a row that the model is to read.
    """
    if not _is_local(address):
        return [f"{name}: {fault}" for fault in _remote_faults(address)]
    try:
        faults = _folder_faults(
            address,
            road,
            ignore_fields,
            needs_tokenizer=needs_tokenizer,
            needs_weights=needs_weights,
            needs_head=needs_head,
            seq_len=seq_len,
        )
    except (ValueError, OSError) as fault:
        faults = [str(fault)]
    return [f"{name}: {fault}" for fault in faults]


def run_faults(address: str) -> list[str]:
    """Returns why a run cannot be exported from its checkpoints, where it cannot."""
    run = RunFolder(Path(address).expanduser())
    try:
        model = run.model()
    except (ValueError, KeyError, TypeError) as fault:
        return [f"{run.record} is no record of a run: {fault!r}"]
    faults = model_faults(
        "the run's model",
        model.address,
        road=cast(api.Road, model.road),
        ignore_fields=model.ignore_fields,
    )
    if not run.checkpoints.is_dir() or not any(run.checkpoints.iterdir()):
        faults.append(f"{address} has no checkpoint yet")
    return faults


def local_folder(address: str) -> Folder | None:
    """Returns a model's folder where it is on this machine and in order, else None."""
    if not _is_local(address) or _is_gguf(address):
        return None
    try:
        folder = open_folder(address)
        return None if folder.is_adapter or not folder.config else folder
    except (ValueError, OSError):
        return None


def _is_local(address: str) -> bool:
    return Path(address).expanduser().exists()


def _is_gguf(address: str) -> bool:
    """Whether an address is a GGUF file, which is converted when it is loaded."""
    return Path(address).suffix == ".gguf"


def _folder_faults(
    address: str,
    road: api.Road,
    ignore_fields: Sequence[str],
    *,
    needs_tokenizer: bool,
    needs_weights: bool,
    needs_head: bool,
    seq_len: int | None,
) -> list[str]:
    if _is_gguf(address):
        return []
    folder = open_folder(address)
    if folder.is_adapter:
        return model_faults(
            "the adapter's base",
            base_address(folder),
            road=road,
            ignore_fields=ignore_fields,
            needs_head=needs_head,
            seq_len=seq_len,
        )
    faults = _loading_faults(folder, road, ignore_fields) if needs_weights else []
    if needs_tokenizer and not (folder.path / "tokenizer.json").exists():
        faults.append(f"{address} has no tokenizer.json, needed to read text")
    if needs_head:
        faults += row_faults(address)
    faults += [] if seq_len is None else _position_faults(folder, seq_len)
    names = folder.config.get("architectures") or [""]
    if needs_head and is_trunk(names[0]):
        faults.append(
            f"{address} is a {names[0]}, which has no language-model head and gives no "
            "logits, and this command needs them (hidden states are trained from "
            "Python, by EncoderStates in Distillation)"
        )
    return faults


def row_faults(address: str) -> list[str]:
    """Returns a message where a tokenizer has ids without a row in the model's tables.

    Such an id would be read as NaN. Only for folders on this machine.
    """
    folder = local_folder(address)
    rows = None if folder is None else folder.config.get("vocab_size")
    if folder is None or folder.tokenizer is None or not isinstance(rows, int):
        return []
    last = max(folder.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if last < rows:
        return []
    return [
        f"the tokenizer of {address} has ids up to {last}, and the model's tables have "
        f"{rows} rows (vocab_size): dew extend --model {address} --out FOLDER adds rows"
    ]


def _position_faults(folder: Folder, seq_len: int) -> list[str]:
    """Returns a message where rows are longer than a table of learned positions."""
    family = FAMILIES.get(str(folder.config.get("model_type")))
    if family is None:
        return []
    try:
        limit = family.read(folder.config).embedding.positions
    except ValueError:
        return []  # Another check reports it, or the lowered road takes it.
    if not limit or seq_len <= limit:
        return []
    return [
        f"--seq-len must be at most the {limit} learned positions of {folder.address}, "
        f"got {seq_len}"
    ]


def _loading_faults(
    folder: Folder, road: api.Road, ignore_fields: Sequence[str]
) -> list[str]:
    faults = []
    refusal = None
    if road != "lowered":
        refusal = unsupported(folder.config, folder.address, ignore_fields)
    if road == "native" and refusal is not None:
        faults.append(str(refusal))
    needs_torch = road == "lowered" or (road == "auto" and refusal is not None)
    if needs_torch and not api.has_torch():
        faults.append(
            f"{folder.address} takes the lowered road, which needs torch and "
            f"transformers: {api.INSTALL}"
        )
    if not any(folder.path.glob("*.safetensors")) and not bin_files(folder.path):
        faults.append(f"{folder.address} has no weights")
    return faults


def _remote_faults(address: str) -> list[str]:
    """Asks the hub, or a URL's file system, whether it has the model."""
    if "://" in address and not address.startswith("hf://"):
        return _url_faults(address)
    name = address.removeprefix("hf://").removeprefix("models/")
    if not HUB_ID.fullmatch(name):
        return [] if name.endswith(".gguf") else [f"there is no folder {address}"]
    repository, _, revision = name.partition("@")
    try:
        snapshot_download(repository, revision=revision or None, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return _hub_faults(address, repository, revision or None)
    return []


def _hub_faults(address: str, repository: str, revision: str | None) -> list[str]:
    """Asks the hub for a model that its cache here does not have."""
    try:
        HfApi().model_info(repository, revision=revision, timeout=HUB_TIMEOUT_S)
    # Each version of the package has another HTTP library, and lets its errors through.
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        return [f"{address} is neither here nor to be had from the hub: {reason}"]
    return []


def _url_faults(address: str) -> list[str]:
    try:
        filesystem, root = url_to_fs(address)
        return [] if filesystem.exists(root) else [f"{address} does not exist"]
    except (ValueError, ImportError, OSError) as error:
        return [f"{address} cannot be opened: {error}"]
