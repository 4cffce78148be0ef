"""Models, tokenizers and text from the addresses on a command line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import file_digest, sha256
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from dew import api
from dew.api import Road
from dew.converters.folder.folder import Folder, bin_files
from dew.converters.folder.weights import read_weights
from dew.converters.load import Shardings
from dew.converters.pretrained import Pretrained
from dew.converters.tied_weights import Tied
from dew.data import open_documents
from dew.data.documents import Documents
from dew.data.teacher_cache import tokenizer_hash
from dew.data.tokenize import template_prefix
from dew.losses.vocabulary import VocabularyMap, align
from dew.nn.decoder import Decoder, Remat

Precision = Literal["float32", "bfloat16"]
Stack = Literal["auto", "scanned", "unrolled"]


class LoadOptions(TypedDict):
    """Arguments of `load_to_train` that are the same for every model of a run."""

    dtype: Precision
    tied: Tied | None
    dequantise: bool
    ignore_fields: Sequence[str]
    shardings: Shardings | None


def load_to_train(
    address: str,
    *,
    dtype: Precision,
    road: Road,
    remat: Remat = "none",
    stack: Stack = "auto",
    tied: Tied | None = None,
    dequantise: bool = False,
    ignore_fields: Sequence[str] = (),
    shardings: Shardings | None = None,
) -> Pretrained:
    """Loads a model that computes in `dtype`; weights keep their stored dtype.

    With `shardings` each weight goes from its file straight to its devices.

    A stack in `auto` is unrolled on a CPU, where that ran 1.8 times faster, and scanned
    elsewhere, where it compiles faster.
    """
    source = api.load(
        address,
        road=road,
        shardings=shardings,
        tied=tied,
        ignore_fields=ignore_fields,
        dequantise=dequantise,
    )
    if not isinstance(source.model, Decoder):
        return source
    is_scanned = stack == "scanned" or (
        stack == "auto" and jax.default_backend() != "cpu"
    )
    model = source.model.clone(dtype=jnp.dtype(dtype), remat=remat, scan=is_scanned)
    return replace(source, model=model)


def texts(paths: Sequence[str], *, field: str, console: Console) -> Documents:
    """Opens text documents, and prints which files of a folder were skipped."""
    documents = open_documents(*paths, text_field=field)
    if documents.skipped:
        console.print(
            f"skipped files that are not text: {', '.join(documents.skipped[:5])}"
        )
    return documents


def tokenizer_of(source: Pretrained) -> Tokenizer:
    """Returns the tokenizer stored with a model.

    Raises:
        ValueError: the model's folder has no tokenizer.json.
    """
    if source.tokenizer is None:
        raise ValueError(f"{source.address} has no tokenizer.json, needed to read text")
    return source.tokenizer


def weights_hash(folder: Folder) -> str:
    """Returns the content hash of a folder's weights, quantised or pickled as they are.

    Raises:
        ValueError: the folder holds no weights.
    """
    weights = read_weights(folder.path)
    if weights is not None:
        return weights.content_hash
    files = bin_files(folder.path)
    if not files:
        raise ValueError(f"{folder.address} has no weights")
    digest = sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def num_blocks(source: Pretrained) -> int:
    """Returns the number of blocks whose hidden states a model can return.

    Raises:
        ValueError: the model does not declare its number of blocks.
    """
    model: object = source.model
    if isinstance(model, Decoder):
        return model.config.layers
    if isinstance(model, CountsBlocks):
        return model.num_blocks
    raise ValueError(f"the number of blocks of {source.address} is unknown")


def configured_blocks(folder: Folder) -> int:
    """Returns the number of blocks in a folder's config.

    Raises:
        ValueError: the config has no known field for it.
    """
    count = blocks_in(folder.config)
    if count is None:
        raise ValueError(
            f"the config of {folder.address} has no field for its number of blocks"
        )
    return count


def blocks_in(config: Mapping[str, Any]) -> int | None:
    """Returns the number of blocks that a config states; None if it states none."""
    names = ("num_hidden_layers", "n_layer", "num_layers")
    counts = [config[name] for name in names if isinstance(config.get(name), int)]
    return counts[0] if counts else None


@runtime_checkable
class CountsBlocks(Protocol):
    """A model that declares its number of blocks, as a lowered one does."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, in the order of the forward pass."""
        ...


def eos_of(source: Pretrained) -> int | None:
    """Returns the token id that ends a document; None if the model has none."""
    return source.eos_ids[0] if source.eos_ids else None


Bos = Literal["auto", "always", "never"]
"""Beginning-of-text tokens before a document: as the tokenizer's template has it."""


def bos_of(source: Pretrained, bos: Bos) -> tuple[int, ...]:
    """Returns the token ids before every document.

    Raises:
        ValueError: `bos` is "always", and nothing names such a token.
    """
    prefix = template_prefix(tokenizer_of(source))
    if bos == "never":
        return ()
    if prefix or bos == "auto":
        return prefix
    if not source.folder.bos_ids:
        raise ValueError(
            "--bos always needs a beginning-of-text token, and neither the template of "
            "tokenizer.json nor generation_config.json, config.json or "
            f"tokenizer_config.json of {source.address} names one"
        )
    return source.folder.bos_ids[:1]


def announce_ends(source: Pretrained, bos: Bos, console: Console) -> None:
    """Prints the tokens before and after every document of a text."""
    tokenizer, before, after = tokenizer_of(source), bos_of(source, bos), eos_of(source)

    def named(ids: Sequence[int]) -> str:
        return ", ".join(f"{tokenizer.id_to_token(i)} (id {i})" for i in ids)

    if before:
        console.print(
            f"documents begin with {named(before)}: --bos {bos}", markup=False
        )
    if after is None:
        console.print(
            "documents are joined without an end-of-text token: generation_config.json,"
            f" config.json and tokenizer_config.json of {source.address} name none",
            markup=False,
        )


def num_rows(source: Pretrained) -> int:
    """Returns the vocabulary size of a model, the last axis of its logits."""
    config: Any = source.config
    return int(config["vocab_size"])


def common_vocabulary(student: Pretrained, teacher: Pretrained) -> VocabularyMap | None:
    """Returns the tokens that both models share; None if their vocabularies are equal.

    Raises:
        ValueError: the tokenizers do not provably agree.
    """
    sides = [(tokenizer_of(side), num_rows(side)) for side in (student, teacher)]
    return vocabulary_between(sides[0], sides[1])


def vocabulary_between(
    student: tuple[Tokenizer, int], teacher: tuple[Tokenizer, int]
) -> VocabularyMap | None:
    """Returns the tokens that two tokenizers share; None if all are equal.

    Each side is a tokenizer, and the number of rows of the model's logits.

    Raises:
        ValueError: the tokenizers do not provably agree.
    """
    hashes = {tokenizer_hash(tokenizer) for tokenizer, _ in (student, teacher)}
    if student[1] == teacher[1] and len(hashes) == 1:
        return None
    return align(
        student[0], teacher[0], student_rows=student[1], teacher_rows=teacher[1]
    )
