"""One small declarative file per architecture."""
