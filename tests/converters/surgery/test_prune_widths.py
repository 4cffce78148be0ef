"""Models cut in width are their sources with the other channels silenced."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dew.converters.load import load_native
from dew.converters.surgery.prune_depth import prune_layers
from dew.converters.surgery.prune_widths import Widths
from tests.support import hf_models as hf
from tests.support.tolerances import CUT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf.llama(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    return hf.save(model, tmp_path_factory.mktemp("widths") / "whole")


def silenced(folder: Path, mlp: int | None, kv: int | None) -> Any:
    """The source in torch, with all but the largest channels of each block at zero."""
    model = hf.reloaded(folder)
    with torch.no_grad():
        for block in model.model.layers:
            if mlp is not None:
                gate, up = block.mlp.gate_proj.weight, block.mlp.up_proj.weight
                down = block.mlp.down_proj.weight
                size = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
                down[:, size.argsort()[: len(size) - mlp]] = 0
            if kv is not None:
                v = block.self_attn.v_proj.weight.view(4, 8, 32)
                o = block.self_attn.o_proj.weight.view(32, 4, 16)
                size = v.norm(dim=(1, 2)) * o.norm(dim=(0, 2))
                o[:, size.argsort()[: 4 - kv]] = 0
    return model


@pytest.mark.parametrize(
    ("mlp", "kv"), [(20, None), (None, 2), (31, 1)], ids=["mlp", "heads", "both"]
)
def test_a_narrower_model_is_its_source_with_the_rest_silenced(
    folder: Path, tmp_path: Path, mlp: int | None, kv: int | None
) -> None:
    widths = Widths(mlp=mlp, kv_heads=kv)
    cut = prune_layers(load_native(folder), (0, 1), tmp_path / "cut", widths)
    ids = hf.tokens()
    want = hf.torch_logits(silenced(folder, mlp, kv), ids)
    assert hf.largest_difference(hf.torch_logits(hf.reloaded(cut), ids), want) < CUT
    ours = load_native(cut)
    assert ours.config["intermediate_size"] == (mlp or 48)
    assert ours.config["num_key_value_heads"] == (kv or 4)
    assert ours.config["num_attention_heads"] == 2 * (kv or 4)
    assert hf.largest_difference(ours.logits(ids), want) < CUT


def test_dimensions_of_the_hidden_states_are_cut_alike_everywhere(
    folder: Path, tmp_path: Path
) -> None:
    source = load_native(folder)
    widths = Widths(embed=24, mlp=40)
    cut = load_native(prune_layers(source, (1,), tmp_path / "cut", widths))
    assert cut.config["hidden_size"] == 24
    assert cut.config["head_dim"] == 8
    table, whole = (
        np.asarray(s.variables["params"]["embed"]["weight"]) for s in (cut, source)
    )
    columns = [
        int(np.flatnonzero((whole == column[:, None]).all(axis=0))[0])
        for column in table.T
    ]
    assert columns == sorted(set(columns))
    for name in ("attn_norm", "mlp_norm"):
        np.testing.assert_array_equal(
            cut.variables["params"]["layers"]["0"][name]["weight"],
            source.variables["params"]["layers"]["1"][name]["weight"][
                np.asarray(columns)
            ],
        )
    ids = hf.tokens()
    want = hf.torch_logits(hf.reloaded(tmp_path / "cut"), ids)
    assert hf.largest_difference(cut.logits(ids), want) < CUT


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        (Widths(mlp=49), "mlp can be 1 to 48, got 49"),
        (Widths(kv_heads=0, embed=40), r"kv can be 1 to 4, got 0; embed can be"),
    ],
)
def test_widths_out_of_range_are_refused(
    folder: Path, tmp_path: Path, widths: Widths, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prune_layers(load_native(folder), (0,), tmp_path / "cut", widths)
    assert not (tmp_path / "cut").exists()
