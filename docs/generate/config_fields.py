"""Table of the config fields that transformers knows, which dew ships.

python -m docs.generate.config_fields    # rewrites known_fields.json
"""

import json
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from dew.bridges.loading.config_fields import known_fields, rope_keys
from dew.converters.config.known_fields import FILE
from dew.converters.families import FAMILIES


def table() -> dict[str, Any]:
    """Returns the fields of all native families, from the installed version."""
    families = {
        model_type: known_fields(CONFIG_MAPPING[model_type])
        for model_type in sorted(FAMILIES)
    }
    return {
        "transformers": transformers.__version__,
        "rope_keys": " ".join(sorted(rope_keys())),
        "families": {
            model_type: {
                "declared": " ".join(sorted(f.declared)),
                "read": " ".join(sorted(f.read)),
            }
            for model_type, f in families.items()
        },
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
