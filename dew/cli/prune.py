"""`dew prune`: a smaller model made of part of a model's weights."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from rich.console import Console

from dew import api
from dew.cli.inputs import (
    local_folder,
    model_faults,
    output_faults,
    refuse,
    too_small,
)
from dew.cli.load import blocks_in
from dew.cli.report import show
from dew.converters.surgery.prune_depth import num_layers, prune_layers, spread_layers
from dew.converters.surgery.prune_widths import Widths
from dew.tree import flatten


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Cut layers or widths of a model, to be distilled or trained further."""

    model: str
    """Model to prune: a Hugging Face folder, a hub id, or the folder of a dew run."""
    out: Path
    """Folder to write, which must not exist yet."""
    layers: tuple[int, ...] = ()
    """Indices of the blocks to keep, from 0, in their new order."""
    num_layers: int | None = None
    """Number of blocks to keep, evenly spaced; an alternative to --layers."""
    mlp: int | None = None
    """Neurons to keep in every feed-forward layer: those with the largest weights."""
    kv_heads: int | None = None
    """Key/value heads to keep, with their queries: those with the largest weights."""
    embed: int | None = None
    """Dimensions of the hidden states to keep: those with the largest weights."""
    ignore_fields: tuple[str, ...] = ()
    """Fields of config.json to ignore although transformers reads them."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of a table."""

    def check(self) -> None:
        """Raises one ValueError that names every fault of flags and files."""
        faults = model_faults(
            "--model",
            self.model,
            road="native",
            ignore_fields=self.ignore_fields,
        )
        faults += output_faults(self.out)
        faults += too_small(self, 1, "num_layers", "mlp", "kv_heads", "embed")
        selections = bool(self.layers) + (self.num_layers is not None)
        if selections > 1 or (not selections and self._widths.is_whole):
            faults.append(
                "give --layers or --num-layers, not both, or a width to cut; got "
                f"--layers {list(self.layers)} and --num-layers {self.num_layers}"
            )
        refuse([*faults, *self._layer_faults()])

    @property
    def _widths(self) -> Widths:
        return Widths(mlp=self.mlp, kv_heads=self.kv_heads, embed=self.embed)

    def _layer_faults(self) -> list[str]:
        """Returns the blocks that are named twice, or that the config does not have."""
        faults = []
        if len(set(self.layers)) < len(self.layers):
            faults.append(f"--layers: a block is named twice in {list(self.layers)}")
        folder = local_folder(self.model)
        count = None if folder is None else blocks_in(folder.config)
        if count is None:
            return faults
        strange = [i for i in self.layers if not 0 <= i < count]
        if strange:
            faults.append(f"--layers: {strange} are no blocks of 0 to {count - 1}")
        if self.num_layers is not None and self.num_layers > count:
            faults.append(
                f"--num-layers must be at most the {count} blocks, got "
                f"{self.num_layers}"
            )
        return faults

    def run(self) -> int:
        """Cuts, saves and certifies the model, and prints its size."""
        widths = self._widths
        console = Console(stderr=True)
        source = api.load(self.model, ignore_fields=self.ignore_fields)
        count = num_layers(source)
        layers = self.layers or spread_layers(count, self.num_layers or count)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        # Through a scratch folder, because a certificate is of a model that was loaded.
        with TemporaryDirectory(dir=self.out.parent, prefix=".prune-") as scratch:
            folder = prune_layers(source, layers, Path(scratch) / "cut", widths)
            cut = api.load(folder)
            certificate = api.save_certified(cut, self.out, console=console)
            parameters = sum(leaf.size for leaf in flatten(cut.variables).values())
        proof = None if certificate is None else certificate.json()
        result = {"kept": list(layers), "parameters": parameters, "certificate": proof}
        rows = [
            ("blocks kept", f"{', '.join(map(str, layers))} of {count}"),
            ("parameters", f"{parameters:,}"),
        ]
        show(f"{self.model} → {self.out}", rows, result, self.json)
        return 0
