"""Amide couplings as SMILES text, the data of the chemistry examples.

Every acid is combined with every amine: `CC(=O)O.CCN>>CC(=O)NCC`. The tokenizer is that
of rxnmapper's ALBERT, which was trained on a million reactions from patents.
"""

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

ACIDS = (
    "CC CCC CCCC CC(C)C C1CC1 C1CCC1 C1CCCC1 c1ccccc1 Cc1ccccc1 Clc1ccccc1 "
    "Brc1ccccc1 Fc1ccccc1 c1ccncc1 c1ccco1 c1cccs1 COCC CC(C)(C)C N#CC O=C(C)NC "
    "c1ccc2ccccc2c1 FC(F)(F)C COc1ccccc1 CSCC C=CC"
).split()
AMINES = (
    "NC NCC NCCC NC(C)C NCCO NCCOC N1CCCC1 N1CCCCC1 N1CCOCC1 N1CCN(C)CC1 Nc1ccccc1 "
    "Nc1ccc(F)cc1 Nc1ccc(Cl)cc1 Nc1ccncc1 NCc1ccccc1 NC1CC1 NC1CCCCC1 NCC#N NOC "
    "NCC(F)(F)F NCCN(C)C Nc1ccc(OC)cc1 Nc1nccs1 NCC=C"
).split()
START, END, PAD, MASK, UNKNOWN = "[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]"


def couplings(seed: int = 0) -> list[tuple[str, str]]:
    """Returns all pairs of reactants and product, shuffled by the seed."""
    pairs = [
        (f"{acid}C(=O)O.{amine}", f"{acid}C(=O){amine}")
        for acid in ACIDS
        for amine in AMINES
    ]
    order = np.random.default_rng(seed).permutation(len(pairs))
    return [pairs[i] for i in order]


def smiles_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a folder's `vocab.txt`, of atoms, bonds and rings."""
    words = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    vocab = {word: i for i, word in enumerate(words) if word}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=UNKNOWN))
    # Text in brackets is one atom, and so are Br and Cl.
    atoms = Regex(r"\[[^\]]*\]|Br|Cl|>>|%\d\d|.")
    tokenizer.pre_tokenizer = Split(atoms, behavior="isolated")
    tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A {END}",
        special_tokens=[(word, vocab[word]) for word in (START, END)],
    )
    return tokenizer


def id_of(tokenizer: Tokenizer, word: str) -> int:
    """Returns the id of a word in the vocabulary."""
    return tokenizer.get_vocab()[word]


def pad_rows(rows: list[list[int]], width: int, fill: int) -> np.ndarray:
    """Returns rows of ids as one padded array; rows past `width` are cut."""
    table = np.full((len(rows), width), fill, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row[:width]
    return table
