"""A run's folder: `run.json`, `checkpoints/`, `logs/` and `export/`."""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from dew.processes import process_phase

CERTIFICATE = "certificate.json"
"""File of an export with its certificate; see `dew.save_certified`."""

VERSIONS = ("dew-bridge", "jax", "flax", "optax", "orbax-checkpoint", "grain")
"""Packages whose versions are recorded in run.json."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model that a run trains, as `run.json` records it under `model`."""

    address: str
    """Address of the model that training starts from."""
    pad_vocab: int = 1
    """Multiple that the rows of its vocabulary are padded to."""
    lora: Mapping[str, Any] | None = None
    """Fields of the `dew.Lora` that is trained; None where all weights are."""
    road: str = "auto"
    """Road it was loaded by: native or lowered; auto in older records."""
    tied: str | None = None
    """Side that counts where config and file disagree about a tied head."""
    dequantise: bool = False
    """Whether a quantised folder was read through its plain copy."""
    ignore_fields: Sequence[str] = ()
    """Unknown fields of config.json that were ignored."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run, and the settings it was started with."""

    path: Path

    @property
    def is_run(self) -> bool:
        """Whether the folder holds a run of dew."""
        return self.record.is_file()

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints that orbax writes."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder that trackers write to."""
        return self.path / "logs"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "export"

    @property
    def record(self) -> Path:
        """The run's settings, sources and versions: run.json."""
        return self.path / "run.json"

    def refusal(
        self, *, resume: bool, config: Mapping[str, Any] | None = None
    ) -> str | None:
        """Returns why no run can begin in the folder; None where one can.

        Of a run that is resumed the settings in `config` are compared, if it is given;
        the hashes of its weights, known once they are loaded, are left to `begin`.
        """
        if self.record.exists():
            if not resume:
                return (
                    f"{self.path} holds a run already: pass --resume to go on with it, "
                    "or give another --out"
                )
            if config is None:
                return None
            faults = self._changed_settings(config)
            if not faults:
                return None
            return f"{self.path} is another run: " + "; ".join(faults)
        if self.path.exists() and not self.path.is_dir():
            return f"{self.path} is a file, and a run is a folder"
        if self.path.exists() and any(self.path.iterdir()):
            return f"{self.path} is in use and holds no run of ours"
        return None

    def begin(
        self,
        config: Mapping[str, Any],
        sources: Mapping[str, str],
        *,
        model: TrainedModel,
        resume: bool,
    ) -> None:
        """Writes `run.json`, or checks that a resumed run has the same settings.

        Of several processes the first writes, and the others wait for it.

        Args:
            config: settings of the run by name, as JSON values.
            sources: content hashes of the weights that the run depends on, by the
                setting that has their address: model, student or teacher.
            model: the model that the run trains.
            resume: whether the folder's run is continued.

        Raises:
            ValueError: the folder holds a run and `resume` is false, or holds a run of
                other settings, or other files.
        """
        with process_phase("the run's folder"):
            if jax.process_index() == 0:
                self._write(config, sources, model, resume)

    def _write(
        self,
        config: Mapping[str, Any],
        sources: Mapping[str, str],
        model: TrainedModel,
        resume: bool,
    ) -> None:
        refusal = self.refusal(resume=resume)
        if refusal is not None:
            raise ValueError(refusal)
        if self.record.exists():
            self._check_same(config, sources, model)
        self.path.mkdir(parents=True, exist_ok=True)
        versions = {name: importlib.metadata.version(name) for name in VERSIONS}
        record = {
            "config": dict(config),
            "sources": {str(config.get(k, k)): value for k, value in sources.items()},
            "weights": dict(sources),
            "versions": versions,
            "model": asdict(model),
        }
        partial = self.record.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.record)

    def read(self) -> dict[str, Any]:
        """Returns the fields of `run.json`.

        Raises:
            ValueError: there is no run in this folder.
        """
        if not self.record.exists():
            raise ValueError(f"{self.path} holds no run.json, so it is no run of ours")
        return json.loads(self.record.read_text(encoding="utf-8"))

    def model(self) -> TrainedModel:
        """Returns the model that the run trains.

        Raises:
            ValueError: there is no run in this folder.
        """
        record = self.read()
        config = record["config"]
        if "model" in record:
            # Records from before the road was in them have it in the settings.
            return TrainedModel(
                **{"road": config.get("road", "auto")} | record["model"]
            )
        # Runs made before the record had a model: it is in the command's own settings.
        return TrainedModel(
            address=config["student"] if "student" in config else config["model"],
            pad_vocab=config.get("pad_vocab", 1),
            lora=config.get("lora"),
            road=config.get("road", "auto"),
        )

    @property
    def steps_done(self) -> int:
        """Number of steps of the newest checkpoint; 0 without one."""
        folder = self.checkpoints
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def weights(self) -> dict[str, str]:
        """Returns the content hashes that `begin` was given as `sources`.

        Raises:
            ValueError: there is no run in this folder.
        """
        record = self.read()
        if "weights" in record:
            return record["weights"]
        # Older records have the hashes by address alone.
        config, hashes = record["config"], record.get("sources", {})
        return {
            name: hashes[config[name]] for name in SOURCES if config.get(name) in hashes
        }

    def _check_same(
        self,
        config: Mapping[str, Any],
        sources: Mapping[str, str],
        model: TrainedModel,
    ) -> None:
        """Raises where a setting differs that changes what the run computes."""
        faults = self._changed_settings(config)
        road = self.model().road
        # Before roads were recorded as taken, auto stood for either.
        if "auto" not in (road, model.road) and road != model.road:
            faults.append(f"--road was {road}, is {model.road}")
        hashes = self.weights()
        faults += [
            f"the weights of {_flag(name)} had the hash {hashes[name]}, have {value}"
            for name, value in sources.items()
            if hashes.get(name, value) != value
        ]
        if faults:
            raise ValueError(f"{self.path} is another run: " + "; ".join(faults))

    def _changed_settings(self, config: Mapping[str, Any]) -> list[str]:
        """Lists the settings outside `FREE` that differ, with both values."""
        then, now = {**BEFORE, **self.read()["config"]}, json.loads(json.dumps(config))
        # A setting that the record is too old for was at what it has when not given.
        return [
            f"{_flag(name)} was {then.get(name)}, is {now.get(name)}"
            for name in sorted({*then, *now} - FREE)
            if then.get(name) != now.get(name)
            and not (name not in then and now[name] in (None, False, []))
        ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


BEFORE = {"bos": "never"}
"""What settings were before records had them, where it is not their default."""

SOURCES = ("model", "student", "teacher")
"""Settings that are the address of a model."""

WHERE = frozenset({*SOURCES, "cache", "data", "eval_data", "text_field", "out", "road"})
"""Settings of a place, which may move: its content is compared in their stead.

The content of models by their weights' hashes, of a cache and of data by the position
in them that a checkpoint has, and of a road by the one that was taken.
"""

HOW = frozenset(
    {
        *("fsdp", "tensor", "remat", "stack", "chunk"),
        *("checkpoint_every", "keep_checkpoints", "verify_checkpoints", "resume"),
        *("log_every", "eval_every", "json", "track", "profile", "time_teacher"),
    }
)
"""Settings of how a run computes, saves and reports, not of what it computes."""

FREE = WHERE | HOW | {"steps"}
"""Settings that a resumed run may change; all others change its mathematics."""
