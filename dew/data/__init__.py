"""Text to packed, resumable batches.

    documents = open_documents("corpus/", "more.jsonl")
    batches = training_batches(
        documents, tokenizer=tokenizer, seq_len=2048, batch_size=8, seed=0, eos_id=2
    )
    batch = next(batches)  # tokens, positions, segment_ids: int32 [8, 2048]

Labels are the objective's business: it masks the ones that cross a segment.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.data.batches import evaluation_batches, training_batches
    from dew.data.distillkit import captured_texts, packed_rows
    from dew.data.documents import Documents, open_documents
    from dew.data.packing import Packing
    from dew.data.retokenize import Retokenized
    from dew.data.stream import Batches, Trace
    from dew.data.teacher_cache import (
        CachedBatches,
        CacheWriter,
        TeacherCache,
        tokenizer_hash,
    )

__all__ = [
    "Batches",
    "CacheWriter",
    "CachedBatches",
    "Documents",
    "Packing",
    "Retokenized",
    "TeacherCache",
    "Trace",
    "captured_texts",
    "evaluation_batches",
    "open_documents",
    "packed_rows",
    "tokenizer_hash",
    "training_batches",
]
