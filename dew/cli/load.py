"""What every command that takes a model does with it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import file_digest, sha256
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from dew import api as roads
from dew.api import Road
from dew.converters.folder.folder import CONFIG, bin_files
from dew.converters.folder.weights import read_weights
from dew.converters.open_folder import local_folder
from dew.converters.pretrained import Pretrained
from dew.data import open_documents
from dew.data.documents import Documents
from dew.data.teacher_cache import tokenizer_hash
from dew.losses.vocabulary import VocabularyMap, align
from dew.nn.decoder import Decoder, Remat

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


def weights_hash(address: str) -> str:
    """The content hash of a folder's weights, whoever is going to read them.

    Raises:
        ValueError: it holds none.
    """
    folder = local_folder(address)
    weights = read_weights(folder)
    if weights is not None:
        return weights.content_hash
    files = bin_files(folder)
    if not files:
        raise ValueError(f"{address} holds no weights")
    digest = sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def num_blocks(source: Pretrained) -> int:
    """How many blocks a model has whose states can be asked for.

    Raises:
        ValueError: it does not say.
    """
    model: Any = source.model
    if isinstance(model, Decoder):
        return model.config.layers
    if isinstance(model, Counted):
        return model.num_blocks
    raise ValueError(f"{source.address} does not say how many blocks it has")


def configured_blocks(address: str) -> int:
    """How many blocks a folder's config says that its model has.

    Raises:
        ValueError: it says so in no field that we know.
    """
    config = json.loads((local_folder(address) / CONFIG).read_text(encoding="utf-8"))
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if name in config:
            return int(config[name])
    raise ValueError(f"the config of {address} does not count its blocks")


@runtime_checkable
class Counted(Protocol):
    """A model that counts its blocks, as a lowered one."""

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        ...


def eos_of(source: Pretrained) -> int | None:
    """The id that ends a document, None where the model has none."""
    return source.eos_ids[0] if source.eos_ids else None


def num_rows(source: Pretrained) -> int:
    """How many rows a model's logits have."""
    config: Any = source.config
    return int(config["vocab_size"])


def common_vocabulary(student: Pretrained, teacher: Pretrained) -> VocabularyMap | None:
    """The classes that both sides score; None where rows mean the same on both.

    Raises:
        ValueError: the tokenizers cannot be proved to agree.
    """
    sides = [(tokenizer_of(one), num_rows(one)) for one in (student, teacher)]
    (ours, our_rows), (theirs, their_rows) = sides
    if our_rows == their_rows and tokenizer_hash(ours) == tokenizer_hash(theirs):
        return None
    return align(ours, theirs, student_rows=our_rows, teacher_rows=their_rows)
