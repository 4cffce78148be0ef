"""From config.json to the configuration of a native model, and back."""
