"""Smaller and larger models from a trained one: pruning, new tokens."""
