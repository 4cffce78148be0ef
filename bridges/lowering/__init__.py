"""Torch modules as JAX functions, through torch.export."""
