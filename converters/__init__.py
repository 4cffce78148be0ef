"""Hugging Face folders to JAX variables and back, without torch."""

if __name__ != "dew.converters":
    raise ImportError(f"import dew.converters instead of {__name__}")
