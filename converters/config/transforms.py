"""Transforms of values from a Hugging Face config to the native config.

Each is the `read` of a `Use` in a family's table. Plain arithmetic is a lambda there.
"""

from collections.abc import Sequence

from dew.nn.config import Norm, QKNorm, Residual
from dew.nn.rope import Rope

WINDOWED, FULL = "sliding_attention", "full_attention"
"""Entries of `layer_types`: attention within a sliding window, and to all tokens."""


def windows(types: Sequence[str], window: int | None) -> tuple[int, ...]:
    """Window of each layer, 0 for full attention; empty if no layer has one."""
    unknown = sorted({*types} - {WINDOWED, FULL})
    if unknown:
        raise ValueError(f"must be {WINDOWED} or {FULL}, got {', '.join(unknown)}")
    if WINDOWED not in types:
        return ()
    if not window:
        raise ValueError(f"{WINDOWED} needs a sliding_window, got {window!r}")
    return tuple(window if kind == WINDOWED else 0 for kind in types)


def same_window(window: int | None, layers: int) -> tuple[int, ...]:
    """One window for all layers; empty if the window is null."""
    return () if window is None else (_positive(window),) * layers


def same_window_if_used(
    window: int | None, layers: int, is_used: bool
) -> tuple[int, ...]:
    """One window for all layers; empty unless the config uses windows."""
    return same_window(window if is_used else None, layers)


def windows_if_used(
    types: Sequence[str], window: int | None, is_used: bool
) -> tuple[int, ...]:
    """Window of each layer, 0 for full attention, where the config uses windows."""
    return windows(types, window if is_used else None)


def half_windows(types: Sequence[str], window: int) -> tuple[int, ...]:
    """Windows of an encoder's layers, counted to one side and with the token itself."""
    return windows(types, window // 2 + 1)


def _positive(number: int) -> int:
    if number <= 0:
        raise ValueError(f"must be > 0, got {number!r}")
    return number


def rows_after(rows: int, token: int) -> int:
    """Number of the `rows` that follow row number `token`, at least one."""
    return _positive(rows - token - 1)


def embedding_width(width: int, embed: int) -> int | None:
    """Width of the token embedding, None if it is that of the hidden states."""
    return None if width == embed else width


def shared_blocks(layers: int, groups: int) -> tuple[int, ...]:
    """Group of each layer, in runs whose lengths differ by at most one."""
    if not 1 <= groups <= layers:
        raise ValueError(f"num_hidden_groups must be in [1, {layers}], got {groups}")
    return tuple(int(i / (layers / groups)) for i in range(layers))


def full_no_rope(types: Sequence[str]) -> tuple[bool, ...]:
    """Layers without rotary embedding: those with full attention."""
    return tuple(kind == FULL for kind in types)


def hybrid_no_rope(types: Sequence[str], window: int | None) -> tuple[bool, ...]:
    """Layers without rotary embedding: full ones, if the others have a window."""
    return () if window is None else full_no_rope(types)


def no_rope_layers(has_rope: Sequence[int]) -> tuple[bool, ...]:
    """Layers without rotary embedding: those whose entry is 0."""
    return tuple(not entry for entry in has_rope)


def layer_qk_norm(has: bool, eps: float) -> QKNorm | None:
    """LayerNorm of queries and keys with one set of weights for all heads."""
    norm = Norm(kind="layer", eps=eps, bias=True)
    return QKNorm(norm=norm) if has else None


def layer_qk_norm_each(has: bool, eps: float) -> QKNorm | None:
    """LayerNorm of queries and keys with weights for each head and no bias."""
    norm = Norm(kind="layer", eps=eps)
    return QKNorm(norm=norm, shared_by="each") if has else None


def score_scale(is_scaled: bool) -> float | None:
    """Scale of attention scores: None, the usual 1 / √head_dim, or 1 if unscaled."""
    return None if is_scaled else 1.0


def norm_position(is_before: bool) -> str:
    """Position of a block's norms: before attention and MLP, or after each sum."""
    return "before" if is_before else "sum"


def mlp_width(width: int | None, embed: int) -> int:
    """Inner width of the MLP, 4 times that of the hidden states if null."""
    return 4 * embed if width is None else width


def interleaved_rope(dim: int) -> Rope:
    """Rotary embedding of a head's first `dim` dimensions, in adjacent pairs."""
    return Rope(dim=dim, interleaved=True)


def falcon_kv_heads(kv: int | None, heads: int, grouped: bool, single: bool) -> int:
    """Key heads of Falcon: the field's if `grouped`, else one or as many as heads."""
    if grouped:
        return heads if kv is None else kv
    return 1 if single else heads


def falcon_residual(parallel: bool, grouped: bool, norms: int | None) -> Residual:
    """Block of Falcon: sequential, or parallel parts behind one norm or two."""
    if grouped and not parallel:
        raise ValueError("must be true where new_decoder_architecture is")
    if not grouped and norms not in (None, 1):
        raise ValueError(f"num_ln_in_parallel_attn must be null here, got {norms!r}")
    has_two = grouped and norms in (None, 2)
    return Residual(parallel=parallel, shared=parallel and not has_two)


def first_layers(count: int) -> tuple[int, ...]:
    """Numbers of the first `count` layers, from 0."""
    return tuple(range(count))


def dense_layers(
    step: int, listed: Sequence[int] | None, layers: int
) -> tuple[int, ...]:
    """Layers without experts: those listed, and all but every `step`-th."""
    dense = {*(listed or ())}
    return tuple(i for i in range(layers) if i in dense or (i + 1) % step)


def required_number(number: int | None) -> int:
    """The number itself, for a field whose default in transformers is null."""
    if number is None:
        raise ValueError("must be a number, got null")
    return number


GREEDY, LIMITED = "greedy", "group_limited_greedy"
"""Values of DeepSeek V2's `topk_method`: all experts compete, or groups first."""


def group_count(method: str, groups: int | None) -> int:
    """Number of expert groups; one where all experts compete."""
    return required_number(groups) if method == LIMITED else 1
