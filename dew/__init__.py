"""The bridge between PyTorch and JAX for people who train models."""
