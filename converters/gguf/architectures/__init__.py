"""Tables of tensor names, layouts and metadata, one for each GGUF architecture.

Names are not taken from `gguf.get_tensor_name_map`: it maps the names of all families
to one GGUF name (some thirty to `attn_norm`), so it cannot be read backwards without
the names that a table would have left out. What a row adds to the name, its layout,
its flags and its fusing, would stay in any case, and so would the row.
"""
