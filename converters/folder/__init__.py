"""Files of a Hugging Face folder on disk: fetching, reading, writing."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.converters.folder.folder import Folder
    from dew.converters.folder.safetensors import Header, read_header, write_file
    from dew.converters.folder.weights import Weights, read_weights

__all__ = [
    "Folder",
    "Header",
    "Weights",
    "read_header",
    "read_weights",
    "write_file",
]
