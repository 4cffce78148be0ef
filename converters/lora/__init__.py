"""LoRA adapters: attached to a model, read and written as PEFT's folders."""
