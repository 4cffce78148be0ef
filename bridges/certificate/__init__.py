"""An export reloaded in transformers and compared."""
