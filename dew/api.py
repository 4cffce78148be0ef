"""The short way in and out: `dew.load`, `dew.save` and `dew.certify`.

Torch is imported only where a call needs it; `bridges` is the one place that has it.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import jax
from rich.console import Console

from dew.converters.load import Shardings, UnknownFamilyError, load_native
from dew.converters.lora import peft
from dew.converters.lora.adapters import Adapted
from dew.converters.lora.adapters import adapt as adapt
from dew.converters.lora.config import Lora
from dew.converters.open_folder import local_folder
from dew.converters.pretrained import Pretrained
from dew.converters.save import export
from dew.converters.surgery.vocabulary import extend_vocabulary as extend_vocabulary
from dew.converters.surgery.vocabulary import pad_vocabulary as pad_vocabulary
from dew.converters.tied_weights import Tied
from dew.objectives.distillation.variables import student_variables
from dew.runs import RunFolder
from dew.source import Source
from dew.tasks.generation import TextGeneration
from dew.training.checkpoint import Checkpoints
from dew.tree import flatten, thaw, unflatten
from dew.typing import Variables

if TYPE_CHECKING:
    from dew.bridges.certificate.certify import Certificate

Road = Literal["auto", "native", "lowered"]
"""Ways into JAX."""

CERTIFICATE = "certificate.json"
"""What certifying adds to an export."""


class CertificationError(RuntimeError):
    """A folder that transformers does not read as we do; nothing of it was kept."""


@runtime_checkable
class Saveable(Protocol):
    """A task that `pipeline()` returned, or what `load` returned."""

    @property
    def source(self) -> Source:
        """What it was built on."""
        ...

    @property
    def variables(self) -> Variables | None:
        """The variables it runs with."""
        ...


def load(
    address: str | os.PathLike[str],
    *,
    dtype: Any = None,
    road: Road = "auto",
    shardings: Shardings | None = None,
    tied: Tied | None = None,
    ignore_fields: Sequence[str] = (),
    dequantise: bool = False,
    base: Pretrained | None = None,
) -> Pretrained:
    """Loads a pretrained model from a folder, a hub id, a URL or a run of ours.

    Of a run its export is loaded. An adapter's folder is loaded over `base`, or over
    the model that it names, and gives an `Adapted`. An architecture that the native
    road does not have takes the lowered one, which stderr is told. See
    `dew.converters.load.load_native` for what the other arguments mean.
    """
    adapter = _adapter_at(address)
    if adapter is not None:
        base = base or load(
            peft.base_address(adapter),
            dtype=dtype,
            road=road,
            shardings=shardings,
            tied=tied,
            ignore_fields=ignore_fields,
            dequantise=dequantise,
        )
        return peft.load_adapter(adapter, os.fspath(address), base, dtype=dtype)
    if base is not None:
        raise ValueError(f"base= goes with an adapter's folder, and {address} is none")
    if road == "lowered":
        return _lowered(
            address, dtype=dtype, shardings=shardings, dequantise=dequantise
        )
    try:
        return load_native(
            address,
            dtype=dtype,
            shardings=shardings,
            tied=tied,
            ignore_fields=ignore_fields,
            dequantise=dequantise,
            unpickle=_unpickled,
        )
    except UnknownFamilyError as unknown:
        if road == "native":
            raise
        if not has_torch():
            raise UnknownFamilyError(
                str(unknown),
                f"; the lowered road has what transformers has: {INSTALL}",
            ) from unknown
        console = Console(stderr=True, quiet=jax.process_index() > 0)
        console.print(f"{unknown.fault}: it takes the lowered one", markup=False)
        return _lowered(
            address, dtype=dtype, shardings=shardings, dequantise=dequantise
        )


def _lowered(address: str | os.PathLike[str], **options: Any) -> Pretrained:
    return _bridge("loading.load").load_lowered(address, **options)


def _unpickled(folder: Path) -> Path:
    """Turns a folder's pickles into safetensors; asked only where it has no others."""
    what = f"{folder} has its weights as pytorch_model.bin, a pickle; reading it"
    return _bridge("loading.pickles", what).unpickle(folder)


def _adapter_at(address: str | os.PathLike[str]) -> Path | None:
    """The adapter's folder that an address names, None where it names a model."""
    folder = local_folder(address)
    if is_run(folder):
        folder = RunFolder(folder).export
    return folder if peft.is_adapter(folder) else None


def save(
    task: Saveable,
    folder: str | os.PathLike[str],
    variables: Variables | None = None,
    *,
    dtype: Any = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
    merge: bool = False,
) -> Path:
    """Writes a task or a loaded model as a folder that transformers loads.

    Config, tokenizer and side files are those of the folder it was loaded from. Of a
    model with an adapter the adapter alone is written, as PEFT's folder, unless `merge`
    asks for the whole. See `dew.converters.save.export` for what the other
    arguments mean.

    Raises:
        TypeError: the model came from no folder, so there is no config to write.
        ValueError: `merge` of a model without an adapter, or a dtype for an adapter.
    """
    source = task.source
    if not isinstance(source, Pretrained):
        raise TypeError(
            f"dew.save needs a model that dew.load returned, got a "
            f"{type(source).__name__}: it has no folder whose config, tokenizer and "
            "layout an export could keep"
        )
    current = task.variables if variables is None else variables
    options: dict[str, Any] = {"overwrite": overwrite, "check": check}
    if isinstance(source, Adapted) and not merge:
        if dtype is not None or max_shard_size is not None:
            raise ValueError(
                f"an adapter is one file in the dtypes it was trained in; dtype={dtype}"
                f" and max_shard_size={max_shard_size} go with merge=True"
            )
        return peft.save_adapter(source, folder, current or {}, **options)
    if merge and not isinstance(source, Adapted):
        raise ValueError(f"{source.address} has no adapter to merge")
    source, current = source.plain(current or {})
    return export(
        source, folder, current, dtype=dtype, max_shard_size=max_shard_size, **options
    )


def trained(run: str | os.PathLike[str], *, ema: bool = True) -> TextGeneration:
    """Returns what a run has learned so far, from its newest checkpoint.

    Raises:
        ValueError: the folder holds no run, or no checkpoint yet.
    """
    folder = RunFolder(Path(run))
    config = folder.read()["config"]
    source = load(config["student"] if "student" in config else config["model"])
    if config.get("pad_vocab", 1) != 1:
        source = pad_vocabulary(source, config["pad_vocab"])
    if config.get("lora"):
        source = adapt(source, Lora(**config["lora"]), key=jax.random.key(0))
    saved = Checkpoints(folder.checkpoints)
    try:
        learned = student_variables(saved.variables(ema=ema))
        moved = flatten(thaw(learned))
    finally:
        saved.close()
    return TextGeneration(source, unflatten(flatten(source.variables) | moved))


def live_batches(
    address: str,
    data: Any,
    *,
    top_k: int,
    temperature: float,
    layers: tuple[int, ...] = (),
) -> Any:
    """Lets a torch teacher read a stream of batches beside the step.

    See `dew.bridges.teachers.batches.LiveBatches`.
    """
    live = _bridge("teachers.batches").live_batches
    return live(address, data, top_k=top_k, temperature=temperature, layers=layers)


def is_run(address: str | os.PathLike[str]) -> bool:
    """Whether an address is the folder of a run of ours."""
    return RunFolder(Path(address)).record.is_file()


def certify(
    folder: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = (),
    example_inputs: Mapping[str, Any] | None = None,
) -> "Certificate":
    """Reloads a folder in transformers and compares it with our own forward.

    Both compute in float32. What is found is in the certificate, passed or not. A model
    that reads other things than text is compared on `example_inputs`, by default a
    small random batch.

    Raises:
        ImportError: torch or transformers is not installed.
        ValueError: the folder cannot be loaded.
    """
    certificate = _bridge("certificate.certify")
    if example_inputs is None:
        ours = load(folder, dtype="float32")
    else:
        ours = _lowered(folder, dtype="float32", example_inputs=example_inputs)
    return certificate.certify(ours, ours.folder.path, prompts=prompts)


def save_certified(
    task: Saveable,
    folder: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = (),
    example_inputs: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    console: Console,
    **options: Any,
) -> "Certificate | None":
    """Saves a task, and certifies the folder before it takes its name.

    The certificate goes into the folder as `certificate.json`, with what the caller
    has to say of the `run` beside it; see `certify` for what is compared. `options`
    are those of `save`. Without torch there is no certificate, which the console is
    told.

    Raises:
        CertificationError: the check failed; no folder is left.
    """
    is_adapter = isinstance(task.source, Adapted) and not options.get("merge")
    needed = ("torch", "transformers", *(("peft",) if is_adapter else ()))
    lacking = [name for name in needed if not importlib.util.find_spec(name)]
    if lacking:
        save(task, folder, **options)
        console.print(
            f"{folder} is written but NOT certified, without {', '.join(lacking)}: "
            "pip install 'dew-bridge[torch,peft]' brings them"
        )
        return None
    found: list[Certificate] = []

    def check(partial: Path) -> None:
        with console.status("reloading the export in transformers"):
            certificate = certify(
                partial, prompts=prompts, example_inputs=example_inputs
            )
        if not certificate.passed:
            raise CertificationError(
                f"{folder} was not written: " + "; ".join(certificate.faults)
            )
        whole = certificate.json() | ({} if run is None else {"run": dict(run)})
        text = json.dumps(whole, indent=2, ensure_ascii=False)
        (partial / CERTIFICATE).write_text(text + "\n", encoding="utf-8")
        found.append(certificate)

    save(task, folder, check=check, **options)
    # Of several processes the first alone writes, and checks what it wrote.
    return found[0] if found else None


INSTALL = "pip install 'dew-bridge[torch]' brings them"


def has_torch() -> bool:
    """Whether what the extra `torch` brings is installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def _bridge(module: str, what: str = "this") -> ModuleType:
    """Imports a module of `bridges`, which needs torch."""
    if not has_torch():
        raise ImportError(f"{what} needs torch and transformers: {INSTALL}")
    return importlib.import_module(f"dew.bridges.{module}")
