"""Text to packed, resumable batches."""
