"""GGUF files, read as Hugging Face folders."""
