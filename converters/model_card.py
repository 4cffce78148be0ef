"""The model card, README.md, of a trained export."""

import re
from collections.abc import Mapping

import numpy as np

from dew.converters.folder.fetch import HUB_ID
from dew.converters.folder.safetensors import Spec
from dew.converters.pretrained import Pretrained


def model_card(source: Pretrained, specs: Mapping[str, Spec]) -> str:
    """Returns the text of README.md: the model's origin, size, and how to load it."""
    readme = source.folder.path / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    licence = re.search(r"^license: .+$", text, flags=re.MULTILINE)
    head = [
        "library_name: transformers",
        *([licence.group(0)] if licence else []),
        *(
            [f"base_model: {source.address}"]
            if HUB_ID.fullmatch(source.address)
            else []
        ),
        "tags:",
        "- dew",
    ]
    names = {spec.dtype.name for spec in specs.values()}
    count = sum(int(np.prod(spec.shape)) for spec in specs.values())
    model_type = source.config.get("model_type")
    return "\n".join(
        [
            "---",
            *head,
            "---",
            "",
            f"# Trained from {source.address}",
            "",
            f"A `{model_type}` model of {count:,} parameters "
            f"({', '.join(sorted(names))}), "
            "trained further in JAX with dew and written back for transformers.",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")',
            "```",
            "",
        ]
    )
