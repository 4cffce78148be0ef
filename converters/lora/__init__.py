"""LoRA adapters: attached to a model, read and written as PEFT's folders."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.converters.lora.adapters import Adapted, adapt
    from dew.converters.lora.config import Lora
    from dew.converters.lora.peft import load_adapter, save_adapter

__all__ = [
    "Adapted",
    "Lora",
    "adapt",
    "load_adapter",
    "save_adapter",
]
