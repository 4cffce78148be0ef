"""What every command that takes a model does with it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from dew import roads
from dew.converters.pretrained import Pretrained
from dew.data import open_documents
from dew.data.documents import Documents
from dew.nn.decoder import Decoder, Remat
from dew.roads import Road

Precision = Literal["float32", "bfloat16"]
Stack = Literal["auto", "scanned", "unrolled"]


def load_to_train(
    address: str,
    *,
    dtype: Precision,
    road: Road,
    remat: Remat = "none",
    stack: Stack = "auto",
) -> Pretrained:
    """Loads a model that computes in `dtype`, over weights as they are stored.

    A stack in `auto` is unrolled on a CPU, where that ran 1.8 times faster, and scanned
    elsewhere, where it compiles sooner.
    """
    source = roads.load(address, road=road)
    if not isinstance(source.model, Decoder):
        return source
    is_scanned = stack == "scanned" or (
        stack == "auto" and jax.default_backend() != "cpu"
    )
    model = source.model.clone(dtype=jnp.dtype(dtype), remat=remat, scan=is_scanned)
    return replace(source, model=model)


def texts(paths: Sequence[str], *, field: str, console: Console) -> Documents:
    """Opens documents and says aloud which files of a folder were passed over."""
    documents = open_documents(*paths, text_field=field)
    if documents.skipped:
        console.print(f"not text, passed over: {', '.join(documents.skipped[:5])}")
    return documents


def tokenizer_of(source: Pretrained) -> Tokenizer:
    """Returns the model's tokenizer.

    Raises:
        ValueError: its folder has none.
    """
    if source.tokenizer is None:
        raise ValueError(f"{source.address} has no tokenizer.json, which text needs")
    return source.tokenizer


def eos_of(source: Pretrained) -> int | None:
    """The id that ends a document, None where the model has none."""
    return source.eos_ids[0] if source.eos_ids else None
