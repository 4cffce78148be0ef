"""The public functions: load, save, certify, adapt, and continue from a run.

Torch is imported only where a call needs it; only `dew.bridges` may.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Protocol,
    TypedDict,
    Unpack,
    cast,
    runtime_checkable,
)

import jax
from jax.typing import ArrayLike, DTypeLike
from rich.console import Console

from dew.converters.errors import UnsupportedError, nearest
from dew.converters.load import (
    Shardings,
    load_native,
    unsupported,
)
from dew.converters.lora import peft
from dew.converters.lora.adapters import Adapted
from dew.converters.lora.adapters import adapt as adapt
from dew.converters.lora.config import Lora
from dew.converters.open_folder import Address, open_folder
from dew.converters.pretrained import Pretrained
from dew.converters.pretrained import Road as Road
from dew.converters.save import export
from dew.converters.surgery.vocabulary import extend_vocabulary as extend_vocabulary
from dew.converters.surgery.vocabulary import pad_vocabulary as pad_vocabulary
from dew.converters.tied_weights import Tied
from dew.objectives.distillation.variables import student_variables
from dew.runs import CERTIFICATE as CERTIFICATE
from dew.runs import RunFolder
from dew.source import Source
from dew.tasks.generation import TextGeneration
from dew.training.checkpoint import Checkpoints
from dew.tree import flatten, thaw, unflatten
from dew.typing import Variables

if TYPE_CHECKING:
    from dew.bridges.certificate.certify import Certificate
    from dew.bridges.teachers.batches import LiveBatches
    from dew.data.retokenize import Positioned


class CertificationError(RuntimeError):
    """An export on which transformers and dew disagree; its folder was removed."""


@runtime_checkable
class Saveable(Protocol):
    """A trained task from `pipeline()`, or a model from `load`."""

    @property
    def source(self) -> Source:
        """The model that training started from."""
        ...

    @property
    def variables(self) -> Variables | None:
        """The variables that the task or model applies."""
        ...


class SaveOptions(TypedDict, total=False):
    """Keyword arguments of `save` that `save_certified` passes on."""

    variables: Variables | None
    dtype: DTypeLike | None
    max_shard_size: int | str | None
    overwrite: bool
    merge: bool


def load(
    address: Address,
    *,
    dtype: DTypeLike | None = None,
    road: Road = "auto",
    shardings: Shardings | None = None,
    tied: Tied | None = None,
    ignore_fields: Sequence[str] = (),
    dequantise: bool = False,
    base: Pretrained | None = None,
) -> Pretrained:
    """Loads a pretrained model from a folder, a hub id, a URL or a run's folder.

    What the native road lacks, an architecture or a field of its config, is loaded by
    the lowered one, with a line on stderr. Another line names the fields of config.json
    that transformers does not read: they have no effect. An adapter's folder gives an
    `Adapted`: the adapter over its base model.

        >>> import dew, numpy as np
        >>> source = dew.load(FOLDER)
        >>> source.config["model_type"], source.road
        ('llama', 'native')
        >>> source.logits(np.array([[1, 2, 3]])).shape
        (1, 3, 97)

    Args:
        address: a folder, a hub id, a URL, a .gguf file, or a run's folder, which
            gives its export, as `dew.converters.open_folder.open_folder` has it.
        dtype: dtype of the parameters; None keeps the stored one.
        road: "native" for dew's own modules, "lowered" for transformers' module through
            torch.export, "auto" for the native road where it has the architecture.
        shardings: sharding of each variable; None is the default device.
        tied: on the native road, whether config or file counts where they disagree
            about a tied head, see `dew.converters.tied_weights`.
        ignore_fields: on the native road, fields of config.json to ignore although
            transformers reads them.
        dequantise: whether a quantised folder is read through its plain copy.
        base: the model an adapter is loaded over; None loads the one its config names.

    Raises:
        ValueError: the address names nothing, or fields or tensors of the folder are
            not accounted for; the message lists all of them.
        UnsupportedError: the model needs a road other than `road`, or one that is not
            installed.
    """
    source, notes = _loaded(
        address,
        dtype=dtype,
        road=road,
        shardings=shardings,
        tied=tied,
        ignore_fields=ignore_fields,
        dequantise=dequantise,
        base=base,
    )
    console = Console(stderr=True, quiet=jax.process_index() > 0)
    for note in notes:
        console.print(note, markup=False)
    return source


def _loaded(
    address: Address,
    *,
    dtype: DTypeLike | None = None,
    road: Road = "auto",
    shardings: Shardings | None = None,
    tied: Tied | None = None,
    ignore_fields: Sequence[str] = (),
    dequantise: bool = False,
    base: Pretrained | None = None,
) -> tuple[Pretrained, list[str]]:
    """Returns the model as `load` has it, and what its user should know of it."""
    folder = open_folder(address, dequantise=dequantise, unpickle=_unpickle)
    notes: list[str] = []
    if folder.is_adapter:
        if base is None:
            base, notes = _loaded(
                peft.base_address(folder),
                dtype=dtype,
                road=road,
                shardings=shardings,
                tied=tied,
                ignore_fields=ignore_fields,
                dequantise=dequantise,
            )
        return peft.load_adapter(folder, base, dtype=dtype), notes
    if base is not None:
        raise ValueError(
            f"base= goes with an adapter's folder, and {folder.address} is none"
        )
    refusal = None
    if road == "auto":
        refusal = unsupported(folder.config, folder.address, ignore_fields)
        notes += [] if refusal is None else [_lowered_in_place(refusal)]
    if road == "native" or (road == "auto" and refusal is None):
        source = load_native(
            folder,
            dtype=dtype,
            shardings=shardings,
            tied=tied,
            ignore_fields=ignore_fields,
        )
    else:
        bridge = _bridge("loading.load")
        source = bridge.load_lowered(folder, dtype=dtype, shardings=shardings)
    return source, notes + ignored_note(source)


def _lowered_in_place(refusal: UnsupportedError) -> str:
    """Returns why the lowered road is taken; raises where torch is missing."""
    if not has_torch():
        advice = f"; the lowered road has what transformers has: {INSTALL}"
        raise type(refusal)(str(refusal), advice)
    return f"{refusal.fault}: it takes the lowered one"


def ignored_note(source: Pretrained) -> list[str]:
    """Returns a line that names the fields of config.json without effect, if any."""
    if not source.ignored_fields:
        return []
    known, version = source.known_fields, source.config.get("transformers_version")
    names = [] if known is None else sorted(known.declared | known.read)
    named = ", ".join(
        name + nearest(name, names, likeness=0.85) for name in source.ignored_fields
    )
    if known is None or not known.predates(version):
        return [
            f"{source.address}: fields of config.json without effect, as transformers "
            f"does not read them: {named}"
        ]
    return [
        f"{source.address} was written by transformers {version}; dew knows the fields "
        f"of {known.version}, which does not read {named}: they have no effect here, "
        "and the certificate decides whether that is right"
    ]


def _unpickle(folder: Path) -> Path:
    """Returns a folder of safetensors converted from a folder's pickles."""
    purpose = f"{folder} has its weights as pytorch_model.bin, a pickle; reading it"
    return _bridge("loading.pickles", purpose).unpickle(folder)


def save(
    task: Saveable,
    folder: str | os.PathLike[str],
    variables: Variables | None = None,
    *,
    dtype: DTypeLike | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    check: Callable[[Path], object] | None = None,
    merge: bool = False,
) -> Path:
    """Writes a task or a loaded model as a folder that transformers loads.

    Config, tokenizer and side files are copied from the folder it was loaded from. Of a
    model with an adapter the adapter alone is written, as PEFT's folder, unless `merge`
    is true.

        >>> import dew
        >>> source = dew.load(FOLDER)
        >>> copy = dew.load(dew.save(source, "copy"))
        >>> copy.content_hash == source.content_hash
        True

    Args:
        task: a task from `pipeline()`, or a model from `load`.
        folder: the folder to write; it appears when it is complete.
        variables: variables to write in place of the task's own.
        dtype: dtype of all parameters; None keeps the stored ones.
        max_shard_size: bytes of a weight file, or "5GB"; None keeps the source's files.
        overwrite: whether an existing folder is replaced.
        check: called with the finished folder before it gets its name; may raise.
        merge: whether an adapter is merged into the weights, and all of them written.

    Raises:
        TypeError: the model was not loaded from a folder, so it has no config.
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
    if isinstance(source, Adapted) and not merge:
        if dtype is not None or max_shard_size is not None:
            raise ValueError(
                f"an adapter is one file in the dtypes it was trained in; dtype={dtype}"
                f" and max_shard_size={max_shard_size} go with merge=True"
            )
        return peft.save_adapter(
            source, folder, current or {}, overwrite=overwrite, check=check
        )
    if merge and not isinstance(source, Adapted):
        raise ValueError(f"{source.address} has no adapter to merge")
    source, current = source.plain(current or {})
    return export(
        source,
        folder,
        current,
        dtype=dtype,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        check=check,
    )


def trained(
    run: str | os.PathLike[str], *, ema: bool = True, verify: bool = True
) -> TextGeneration:
    """Returns a text generator with the variables of a run's newest checkpoint.

    Args:
        run: the run's folder.
        ema: whether averaged variables are taken where the run keeps them.
        verify: whether the checkpoint is compared with its checksums; where it is
            damaged, the newest intact one is taken, with a line on stderr.

    The model is loaded as the run loaded it: by its road, with its padding, adapter and
    options.

    Raises:
        ValueError: the folder holds no run, or no intact checkpoint, or the model that
            the run started from has other weights now.
    """
    folder = RunFolder(Path(run))
    model = folder.model()
    source = load(
        model.address,
        road=cast(Road, model.road),
        tied=cast(Tied | None, model.tied),
        ignore_fields=model.ignore_fields,
        dequantise=model.dequantise,
    )
    hashes = folder.weights()
    then = hashes.get("student", hashes.get("model"))
    # Frozen weights are taken from there, and the layout of all of them.
    if then not in (None, source.content_hash):
        raise ValueError(
            f"{model.address} is not what {run} started from: its weights had the hash "
            f"{then}, and have {source.content_hash}"
        )
    if model.pad_vocab != 1:
        source = pad_vocabulary(source, model.pad_vocab)
    if model.lora is not None:
        source = adapt(source, Lora(**model.lora), key=jax.random.key(0))
    checkpoints = Checkpoints(folder.checkpoints, verify=verify)
    try:
        variables = student_variables(checkpoints.variables(ema=ema))
        # Copied out of the checkpoint before it is closed.
        leaves = flatten(thaw(variables))
    finally:
        checkpoints.close()
    return TextGeneration(source, unflatten(flatten(source.variables) | leaves))


def live_batches(
    address: Address,
    data: "Positioned",
    *,
    top_k: int,
    temperature: float,
    layers: tuple[int, ...] = (),
) -> "LiveBatches":
    """Returns batches with a torch teacher's scores, computed beside the training step.

    See `dew.bridges.teachers.batches.live_batches`.
    """
    live = _bridge("teachers.batches").live_batches
    return live(address, data, top_k=top_k, temperature=temperature, layers=layers)


def is_run(address: str | os.PathLike[str]) -> bool:
    """Whether an address is the folder of a run of dew."""
    return RunFolder(Path(address)).is_run


def certify(
    folder: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = (),
    example_inputs: Mapping[str, ArrayLike] | None = None,
    road: Road = "auto",
    ignore_fields: Sequence[str] = (),
) -> "Certificate":
    """Reloads a folder in transformers and compares its logits with dew's.

    Both compute in float32. The certificate has the differences, passed or not.

        >>> import dew
        >>> certificate = dew.certify(FOLDER)
        >>> certificate.passed, certificate.missing
        (True, ())

    Args:
        folder: a model's or an adapter's folder.
        prompts: texts that both continue greedily.
        example_inputs: inputs by torch's names, for a model that reads other things
            than text; it is then loaded by the lowered road.
        road: see `load`.
        ignore_fields: see `load`.

    Raises:
        ImportError: torch or transformers is not installed.
        ValueError: the folder cannot be loaded.
    """
    certificate = _bridge("certificate.certify")
    if example_inputs is None:
        source, _ = _loaded(
            folder, dtype="float32", road=road, ignore_fields=ignore_fields
        )
    else:
        lowered = _bridge("loading.load").load_lowered
        source = lowered(folder, dtype="float32", example_inputs=example_inputs)
    return certificate.certify(source, source.folder.path, prompts=prompts)


def save_certified(
    task: Saveable,
    folder: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = (),
    example_inputs: Mapping[str, ArrayLike] | None = None,
    run: Mapping[str, object] | None = None,
    console: Console,
    **options: Unpack[SaveOptions],
) -> "Certificate | None":
    """Saves a task, and certifies the folder before it gets its name.

    The certificate is written into the folder as `certificate.json`. Without torch the
    folder is written without one, None is returned and the console has a message.

    Args:
        task: see `save`.
        folder: see `save`.
        prompts: see `certify`.
        example_inputs: see `certify`.
        run: figures of the training run, written into certificate.json.
        console: receives progress and messages.
        **options: further arguments of `save`.

    Raises:
        CertificationError: the check failed; no folder is left.
    """
    is_adapter = isinstance(task.source, Adapted) and not options.get("merge")
    packages = ("torch", "transformers", *(("peft",) if is_adapter else ()))
    lacking = [name for name in packages if not importlib.util.find_spec(name)]
    if lacking:
        save(task, folder, **options)
        console.print(
            f"{folder} is written but NOT certified, without {', '.join(lacking)}: "
            "pip install 'dew-bridge[torch,peft]' brings them"
        )
        return None
    certificates: list[Certificate] = []
    source = task.source
    loaded_by = _LoadedBy()
    if isinstance(source, Pretrained):
        loaded_by = _LoadedBy(road=source.road, ignore_fields=source.ignored_fields)

    def check(partial: Path) -> None:
        with console.status("reloading the export in transformers"):
            certificate = certify(
                partial,
                prompts=prompts,
                example_inputs=example_inputs,
                **loaded_by,
            )
        if not certificate.passed:
            raise CertificationError(
                f"{folder} was not written: " + "; ".join(certificate.faults)
            )
        record = certificate.json() | ({} if run is None else {"run": dict(run)})
        text = json.dumps(record, indent=2, ensure_ascii=False)
        (partial / CERTIFICATE).write_text(text + "\n", encoding="utf-8")
        certificates.append(certificate)

    save(task, folder, check=check, **options)
    # Of several processes the first alone writes, and checks what it wrote.
    return certificates[0] if certificates else None


class _LoadedBy(TypedDict, total=False):
    """Options of `load` that an export is loaded with as its model was."""

    road: Road
    ignore_fields: Sequence[str]


INSTALL = "pip install 'dew-bridge[torch]' brings them"
"""Advice in messages about missing packages."""


def has_torch() -> bool:
    """Whether the packages of the extra `torch` are installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def _bridge(module: str, purpose: str = "this") -> ModuleType:
    """Imports a module of `dew.bridges`; raises ImportError where torch is missing."""
    if not has_torch():
        raise ImportError(f"{purpose} needs torch and transformers: {INSTALL}")
    return importlib.import_module(f"dew.bridges.{module}")
