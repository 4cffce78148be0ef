"""Tables of tensor names, layouts and metadata, one for each GGUF architecture.

Names are not taken from `gguf.get_tensor_name_map`: it maps the names of all families
to one GGUF name (some thirty to `attn_norm`), so it cannot be read backwards, and each
row would stay in any case for its layout, flags and fusing. The tests write their files
with that map, which checks every name here against an independent source.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
    from dew.converters.gguf.architectures.table import ARCHITECTURES

__all__ = ["ARCHITECTURES"]
