"""A run's folder: `run.json`, `checkpoints/`, `logs/` and `export/`."""

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

VERSIONS = ("dew-bridge", "jax", "flax", "optax", "orbax-checkpoint", "grain")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, and what it was started with."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where orbax keeps states."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Where trackers write."""
        return self.path / "logs"

    @property
    def export(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "export"

    @property
    def record(self) -> Path:
        """The run's own description."""
        return self.path / "run.json"

    def begin(
        self, config: Mapping[str, Any], sources: Mapping[str, str], *, resume: bool
    ) -> None:
        """Writes `run.json`, or checks that a resumed run is the one it describes.

        `sources` are content hashes by address. Of several processes the first writes,
        and the others wait for it.

        Raises:
            ValueError: the folder holds a run already, or another than is resumed.
        """
        if jax.process_index() == 0:
            self._write(config, sources, resume)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("dew.run")

    def _write(
        self, config: Mapping[str, Any], sources: Mapping[str, str], resume: bool
    ) -> None:
        if self.record.exists():
            if not resume:
                raise ValueError(
                    f"{self.path} holds a run already: pass --resume to go on with it, "
                    "or give another --out"
                )
            self._check_same(config, sources)
        elif self.path.exists() and any(self.path.iterdir()):
            raise ValueError(f"{self.path} is in use and holds no run of ours")
        self.path.mkdir(parents=True, exist_ok=True)
        versions = {name: importlib.metadata.version(name) for name in VERSIONS}
        record = {
            "config": dict(config),
            "sources": dict(sources),
            "versions": versions,
        }
        partial = self.record.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.record)

    def read(self) -> dict[str, Any]:
        """Returns what `begin` wrote.

        Raises:
            ValueError: there is no run in this folder.
        """
        if not self.record.exists():
            raise ValueError(f"{self.path} holds no run.json, so it is no run of ours")
        return json.loads(self.record.read_text(encoding="utf-8"))

    def _check_same(
        self, config: Mapping[str, Any], sources: Mapping[str, str]
    ) -> None:
        """Refuses to resume with other settings; `FREE` ones may change."""
        before = self.read()
        flags = {f"--{name.replace('_', '-')}" for name in FREE}
        then = _flat(before["config"], before["sources"])
        now = _flat(json.loads(json.dumps(config)), sources)
        faults = [
            f"{name} was {then.get(name)}, is {now.get(name)}"
            for name in sorted({*then, *now} - flags)
            if then.get(name) != now.get(name)
        ]
        if faults:
            raise ValueError(f"{self.path} is another run: " + "; ".join(faults))


def _flat(config: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Settings by their flags, and weights by their address."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in config.items()}
    return flags | {f"weights of {name}": value for name, value in sources.items()}


FREE = frozenset(
    {"steps", "resume", "log_every", "eval_every", "json", "track", "profile"}
)
"""Settings that a resumed run may change."""
