"""Tables of tensor names and metadata, one row a GGUF architecture."""
