"""Measures of a family's case: logits, gradients, bfloat16 and bytes."""

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import load_file

import dew
from dew.nn.config import MoE
from tests.converters.families.decoders import TINY
from tests.converters.families.grid import Case
from tests.support import hf_models as hf
from tests.support.conditioning import Says, condition, on_a_fair_text
from tests.support.tolerances import FAMILY_GRADIENT, FAMILY_HALF, LOGITS

SHORT, SEQ, LONG = 12, 48, 288
ROWS = 12
"""Rows of the texts in bfloat16, whose distances are averages."""
SHARDS = "20KB"


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Largest differences of one case, as parts of the largest reference value.

    `half` is the distance of our bfloat16 logits from float32, over that of torch's.
    """

    logits: float = 0.0
    gradient: float = 0.0
    half: float = 0.0

    def with_larger(self, other: "Differences") -> "Differences":
        """The larger of each difference."""
        return Differences(
            logits=max(self.logits, other.logits),
            gradient=max(self.gradient, other.gradient),
            half=max(self.half, other.half),
        )

    @property
    def faults(self) -> list[str]:
        """Differences that are over their bounds."""
        bounded = (
            ("logits", self.logits, LOGITS),
            ("gradients", self.gradient, FAMILY_GRADIENT),
            ("bfloat16", self.half, FAMILY_HALF),
        )
        return [
            f"{name}: {value:.2e} is over {bound}"
            for name, value, bound in bounded
            if not value <= bound
        ]


def model_of(family: str, changes: Mapping[str, Any]) -> Any:
    """The random model of a tiny config with these changes."""
    tiny = TINY[family]
    return hf.build(tiny.config(**{**tiny.fields, **changes}), make=tiny.model)


def measure(
    family: str, case: Case, folder: Path, *, jit: bool = False, half: bool = True
) -> Differences:
    """Measures a case, and asserts that its folder comes back byte for byte.

    Gradients are compiled whole with `jit`, which is cheaper for one case; many cases
    share what is compiled op by op. bfloat16 is left out where `half` is false.
    """
    changes = {**case.changes, **TINY[family].with_positions(LONG)}
    hf.save(model_of(family, changes), folder / "in", max_shard_size=SHARDS)
    fields = {**TINY[family].fields, **changes}
    logits = [
        spelling_difference(family, folder, {**fields, **spelling})
        for spelling in case.spellings
    ]
    if not case.spellings:
        logits = [logits_difference(folder)]
    source, model = dew.load(folder / "in"), hf.reloaded(folder / "in")
    return Differences(
        logits=max(logits),
        half=half_ratio(type(model), folder / "in", folder / "half") if half else 0.0,
        gradient=gradient_difference(model, source, folder / "gradients", jit=jit),
    )


def spelling_difference(family: str, folder: Path, fields: Mapping[str, Any]) -> float:
    """`logits_difference` for a config.json of these fields alone."""
    file = folder / "in" / "config.json"
    classes = json.loads(file.read_text())["architectures"]
    about = {"architectures": classes, "model_type": family}
    file.write_text(json.dumps({**about, **fields}, indent=1))
    return logits_difference(folder)


def logits_difference(folder: Path) -> float:
    """The largest difference of the logits of a folder from its own copy's in torch."""
    source = dew.load(folder / "in")
    assert source.road == "native"
    model = check_round_trip(folder / "in", source, folder / "out")
    shutil.rmtree(folder / "out")
    return max(logits_apart(source, model, seq) for seq in (SHORT, LONG))


def logits_apart(source: Any, model: Any, seq: int) -> float:
    """The largest difference of the logits of a fair text of this length."""

    def text(seed: int) -> tuple[np.ndarray, np.ndarray]:
        return padded(seq, model.config.pad_token_id, seed=seed)

    def difference(seed: int) -> float:
        want = torch_real_logits(model, *text(seed))
        return hf.largest_difference(real_logits(source, *text(seed)), want)

    def conditioned(seed: int) -> float:
        return condition(model, logits_of(*text(seed)))

    return on_a_fair_text(LOGITS, difference, conditioned)


def logits_of(ids: np.ndarray, mask: np.ndarray | None) -> Says:
    """Function from a torch model to its logits of a text, without padding."""
    full_mask = np.ones_like(ids) if mask is None else mask
    return lambda model: [torch_real_logits(model, ids, full_mask)]


def padded(
    seq: int, pad: int, rows: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and a mask: a row padded left, one padded right, others without."""
    ids = hf.tokens(rows, seq, seed) % (hf.VOCAB - 1)
    mask = np.ones_like(ids)
    mask[1, : seq // 4] = 0
    mask[2, -seq // 4 :] = 0
    # RoBERTa's positions skip the token, and torch gives its row no gradient.
    ids[ids == pad] = pad + 1
    return np.where(mask, ids, pad), mask


def real_logits(source: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Our float32 logits of all tokens but padding."""
    logits = hf.logits_op_by_op(source, ids, mask)
    return logits.astype(np.float32)[mask.astype(bool)]


def torch_real_logits(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Torch's float32 logits of all tokens but padding."""
    return hf.torch_logits(model, ids, mask)[mask.astype(bool)]


def check_round_trip(folder: Path, source: Any, out: Path) -> Any:
    """Asserts that the folder is saved byte for byte; returns transformers' model."""
    dew.save(source, out)
    check_bytes(folder, out)
    return hf.reloaded(out)


def check_bytes(folder: Path, out: Path) -> None:
    """Asserts equal files: tensors bit for bit and shard for shard."""
    before, after = (sorted(p.name for p in f.iterdir()) for f in (folder, out))
    assert before == after
    for name in before:
        if not name.endswith(".safetensors"):
            assert (folder / name).read_bytes() == (out / name).read_bytes(), name
            continue
        old, new = load_file(folder / name), load_file(out / name)
        assert old.keys() == new.keys(), name
        for tensor in old:
            same = old[tensor].numpy().tobytes() == new[tensor].numpy().tobytes()
            assert same, tensor


def half_ratio(kind: Any, folder: Path, half: Path) -> float:
    """Rms distance of our bfloat16 logits from float32, over that of torch's.

    Weights are bfloat16 numbers in all three. Where a token chooses experts, it is the
    median token's rms: one that chooses others has other logits altogether.
    """
    theirs = kind.from_pretrained(folder, dtype=torch.bfloat16)
    theirs.save_pretrained(half)
    text = padded(SEQ, theirs.config.pad_token_id, ROWS)
    exact = torch_real_logits(copy.deepcopy(theirs).float(), *text)
    source: Any = dew.load(half)
    over = np.median if type(source.model.config.mlp) is MoE else np.mean

    def distance(logits: np.ndarray) -> float:
        return float(np.sqrt(over(np.mean(np.square(logits - exact), axis=-1))))

    return distance(real_logits(source, *text)) / distance(
        torch_real_logits(theirs, *text)
    )


def gradient_difference(
    model: Any, source: Any, folder: Path, *, jit: bool = False
) -> float:
    """The largest difference of a gradient on a fair text, as a part of the largest."""

    def text(seed: int) -> tuple[np.ndarray, np.ndarray]:
        return padded(SEQ, model.config.pad_token_id, seed=seed)

    def conditioned(seed: int) -> float:
        return condition(model, lambda m: torch_gradients(m, *text(seed)))

    return on_a_fair_text(
        FAMILY_GRADIENT,
        lambda seed: gradients_apart(model, source, text(seed), folder, jit=jit),
        conditioned,
    )


def gradients_apart(
    model: Any,
    source: Any,
    text: tuple[np.ndarray, np.ndarray],
    folder: Path,
    *,
    jit: bool,
) -> float:
    """The largest difference of a gradient, as a part of the largest gradient."""
    got = gradients(source, *text, jit=jit)
    theirs = copy.deepcopy(model)
    torch_gradients(theirs, *text)
    # Saved as weights are, the gradients get the names and shapes of the file.
    theirs.save_pretrained(folder)
    want = load_file(folder / "model.safetensors")
    assert got.keys() <= want.keys()
    most = max(float(g.abs().max()) for g in want.values())
    # A tensor without a variable here, as an encoder's second bias beside an untied
    # head, must have no gradient in torch either.
    return max(
        float(np.abs(got.get(name, np.zeros(g.shape)) - g.numpy()).max()) / most
        for name, g in want.items()
    )


def gradients(
    source: Any, ids: np.ndarray, mask: np.ndarray, *, jit: bool
) -> dict[str, np.ndarray]:
    """Gradients of a sum of the real tokens' logits, in the stored layout."""
    weigh = weights(ids, mask)
    inputs = {"tokens": jnp.asarray(ids, jnp.int32), "mask": jnp.asarray(mask, bool)}

    def total(variables: Any) -> jax.Array:
        return jnp.sum(source.model.apply(variables, inputs).logits * weigh)

    slope = jax.grad(total)
    grads = (jax.jit(slope) if jit else slope)(source.variables)
    table = source.table

    def piece(part: Any) -> np.ndarray:
        leaf: Any = grads
        for name in part.target:
            leaf = leaf[name]
        leaf = np.asarray(leaf)
        return leaf if part.entry is None else np.take(leaf, part.entry, part.axis)

    return {name: table.write(name, piece) for name in table.sources}


def weights(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Weights of the logits in the sum, 0 on padding."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(*ids.shape, hf.VOCAB)).astype(np.float32) * mask[..., None]


def torch_gradients(model: Any, ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Torch's gradients of the same sum, written over the model's weights."""
    out = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
    (out * torch.tensor(weights(ids, mask))).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
    return [parameter.detach().numpy() for parameter in model.parameters()]
