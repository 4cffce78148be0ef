"""`dew prune`: a student cut from a model, with the model's own weights."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from rich.console import Console

from dew import api as roads
from dew.cli.report import show
from dew.converters.surgery.prune_depth import num_layers, prune_layers, spread_layers
from dew.converters.surgery.prune_widths import Widths
from dew.tree import flatten


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Keep part of a model as a model of its own, to be distilled or trained."""

    model: str
    """Hugging Face folder, hub id, or a run of ours."""
    out: Path
    """The folder to write; it must not be there yet."""
    layers: tuple[int, ...] = ()
    """The blocks to keep, counted from 0, in their new order."""
    num_layers: int | None = None
    """In place of --layers: so many, evenly spread, the first and the last kept."""
    mlp: int | None = None
    """Neurons to keep of every feed-forward layer: those with the largest weights."""
    kv_heads: int | None = None
    """Heads of keys and values to keep, with their queries; by the same measure."""
    embed: int | None = None
    """Dimensions to keep of the hidden states; likewise."""
    json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object and no table."""

    def run(self) -> int:
        """Cuts, certifies and reports."""
        widths = Widths(mlp=self.mlp, kv_heads=self.kv_heads, embed=self.embed)
        asked = bool(self.layers) + (self.num_layers is not None)
        if asked > 1 or (not asked and widths.is_whole):
            raise ValueError(
                "give --layers or --num-layers, not both, or a width to cut; got "
                f"{list(self.layers)} and {self.num_layers}"
            )
        console = Console(stderr=True)
        source = roads.load(self.model)
        count = num_layers(source)
        layers = self.layers or spread_layers(count, self.num_layers or count)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        # A folder of its own first: certifying needs a model that was loaded.
        with TemporaryDirectory(dir=self.out.parent, prefix=".prune-") as scratch:
            folder = prune_layers(source, layers, Path(scratch) / "cut", widths)
            cut = roads.load(folder)
            certificate = roads.save_certified(cut, self.out, console=console)
            parameters = sum(leaf.size for leaf in flatten(cut.variables).values())
        proof = None if certificate is None else certificate.json()
        result = {"kept": list(layers), "parameters": parameters, "certificate": proof}
        rows = [
            ("blocks kept", f"{', '.join(map(str, layers))} of {count}"),
            ("parameters", f"{parameters:,}"),
        ]
        show(f"{self.model} → {self.out}", rows, result, self.json)
        return 0
