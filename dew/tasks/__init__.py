"""What a trained model does: the inference tasks that `pipeline` returns."""
