"""Text to packed, resumable batches.

    documents = open_documents("corpus/", "more.jsonl")
    batches = training_batches(
        documents, tokenizer=tokenizer, seq_len=2048, batch_size=8, seed=0, eos_id=2
    )
    batch = next(batches)  # tokens, positions, segment_ids: int32 [8, 2048]

Labels are the objective's business: it masks the ones that cross a segment.
"""

from dew.data.batches import evaluation_batches as evaluation_batches
from dew.data.batches import training_batches as training_batches
from dew.data.documents import Documents as Documents
from dew.data.documents import open_documents as open_documents
from dew.data.packing import Packing as Packing
from dew.data.stream import Batches as Batches
from dew.data.stream import Trace as Trace
