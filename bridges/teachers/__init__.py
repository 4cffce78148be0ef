"""Torch models that score batches beside the training step."""
