"""Files of a Hugging Face folder on disk: reading, writing, fetching."""
