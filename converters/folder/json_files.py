"""JSON files of a folder, read as objects."""

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty where the file is absent.

    Raises:
        ValueError: the file is not JSON, or holds something other than an object.
    """
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if type(value) is not dict:
        raise ValueError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
