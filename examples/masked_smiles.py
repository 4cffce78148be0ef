"""Masked-LM training of a real model that is lowered from torch.

rxnmapper's ALBERT, whose twelve layers share weights, is trained on amide couplings;
every sixth reaction is held out. On two cores it takes a minute or two, and the
held-out loss of a masked token falls from 0.140 to 0.026 nats.

    python -m examples.masked_smiles OUT
"""

import sys
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console

import dew
from dew.api import save_certified
from dew.converters import Pretrained
from dew.objectives import MaskedLM, NatsPerToken
from examples.support.loop import Arrays, split_rows, train
from examples.support.reactions import (
    END,
    MASK,
    PAD,
    START,
    couplings,
    id_of,
    pad_rows,
    smiles_tokenizer,
)
from examples.support.weights import cached

SEQ = 72


def prepare(folder: Path) -> Path:
    """Saves the model again in today's format of transformers, with its tokenizer."""
    packed = cached("albert")
    model: Any = transformers.AlbertForMaskedLM.from_pretrained(packed)
    model.save_pretrained(folder)
    smiles_tokenizer(packed).save(str(folder / "tokenizer.json"))
    return folder


def tokens_and_mask() -> Arrays:
    """Returns all reactions as rows of token ids, with the mask of real tokens."""
    tokenizer = smiles_tokenizer(cached("albert"))
    pad = id_of(tokenizer, PAD)
    rows = [tokenizer.encode(f"{a}>>{b}").ids for a, b in couplings()]
    tokens = pad_rows(rows, SEQ, pad)
    return {"tokens": tokens, "mask": tokens != pad}


def objective(source: Pretrained) -> MaskedLM:
    """Returns the loss, which masks 15 % of the tokens that are not special."""
    tokenizer = smiles_tokenizer(cached("albert"))
    return MaskedLM(
        source=source,
        seq_len=SEQ,
        vocab=tokenizer.get_vocab_size(),
        mask_id=id_of(tokenizer, MASK),
        special_ids=tuple(id_of(tokenizer, word) for word in (START, END, PAD)),
    )


def run(out: Path, *, steps: int = 60, rows: int = 16) -> list[float]:
    """Trains and exports the model; returns the held-out loss before and after."""
    source = dew.load(prepare(out / "source"), road="lowered")
    loss = objective(source)
    state, watch = train(
        loss,
        split_rows(tokens_and_mask(), every=6),
        {"nats": NatsPerToken()},
        steps=steps,
        rows=rows,
        rate=5e-4,
    )
    save_certified(
        loss.pipeline(state, ema=False),
        out / "export",
        console=Console(),
    )
    return [metrics["held_out/nats"] for metrics in watch.evaluations]


if __name__ == "__main__":
    before, after = run(Path(*sys.argv[1:2] or ["runs/masked-smiles"]))
    Console().print(f"held-out nats per masked token: {before:.3f} → {after:.3f}")
