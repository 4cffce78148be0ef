"""Stored tensors to variables and back, by one rule a tensor."""
