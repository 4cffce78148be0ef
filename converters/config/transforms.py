"""How a field's value becomes ours, where it is not the value itself."""

import math
from collections.abc import Sequence

from dew.nn.config import Norm, QKNorm, Residual
from dew.nn.rope import Rope

WINDOWED, FULL = "sliding_attention", "full_attention"


def windows(types: Sequence[str], window: int | None) -> tuple[int, ...]:
    """The window of each layer, 0 where it attends to all; nothing where all do."""
    odd = sorted({*types} - {WINDOWED, FULL})
    if odd:
        raise ValueError(f"must be {WINDOWED} or {FULL}, got {', '.join(odd)}")
    if WINDOWED not in types:
        return ()
    if not window:
        raise ValueError(f"{WINDOWED} needs a sliding_window, got {window!r}")
    return tuple(window if kind == WINDOWED else 0 for kind in types)


def same_window(window: int | None, layers: int) -> tuple[int, ...]:
    """One window for all layers; nothing where there is none."""
    return () if window is None else (positive(window),) * layers


def used_window(window: int | None, layers: int, is_used: bool) -> tuple[int, ...]:
    """The same, where windows are used at all."""
    return same_window(window if is_used else None, layers)


def used_windows(
    types: Sequence[str], window: int | None, is_used: bool
) -> tuple[int, ...]:
    """The window of each layer, where windows are used at all."""
    return windows(types, window if is_used else None)


def positive(number: int) -> int:
    """The number, which is not 0 or less."""
    if number <= 0:
        raise ValueError(f"must be > 0, got {number!r}")
    return number


def after(number: int) -> int:
    """The number that follows."""
    return number + 1


def beyond(rows: int, token: int) -> int:
    """How many of `rows` follow row number `token`."""
    return positive(rows - token - 1)


def other_than(width: int, embed: int) -> int | None:
    """The width, or none where it is that of the embedding anyway."""
    return None if width == embed else width


def half_windows(types: Sequence[str], window: int) -> tuple[int, ...]:
    """Windows of which one half lies on each side of a token, which sees itself too."""
    return windows(types, window // 2 + 1)


def shared_blocks(layers: int, groups: int) -> tuple[int, ...]:
    """The group of each layer, in runs of one length as far as they divide."""
    if not 1 <= groups <= layers:
        raise ValueError(f"num_hidden_groups must be in [1, {layers}], got {groups}")
    return tuple(int(i / (layers / groups)) for i in range(layers))


def full_no_rope(types: Sequence[str]) -> tuple[bool, ...]:
    """Layers that attend to all do not turn."""
    return tuple(kind == FULL for kind in types)


def hybrid_no_rope(types: Sequence[str], window: int | None) -> tuple[bool, ...]:
    """The same, but all layers turn where no layer has a window."""
    return () if window is None else full_no_rope(types)


def no_rope_layers(turning: Sequence[int]) -> tuple[bool, ...]:
    """Layers whose entry is 0 do not turn."""
    return tuple(not turns for turns in turning)


def inverse(number: float | int) -> float:
    """1 / x."""
    return 1 / number


def inverse_root(number: float | int) -> float:
    """1 / √x."""
    return number**-0.5


def root(number: float | int) -> float:
    """The square root."""
    return math.sqrt(number)


def layer_qk_norm(has: bool, eps: float) -> QKNorm | None:
    """A LayerNorm of queries and keys with the same weights for all heads."""
    norm = Norm(kind="layer", eps=eps, bias=True)
    return QKNorm(norm=norm) if has else None


def layer_qk_norm_each(has: bool, eps: float) -> QKNorm | None:
    """A LayerNorm of queries and keys with weights for each head and no bias."""
    norm = Norm(kind="layer", eps=eps)
    return QKNorm(norm=norm, shared_by="each") if has else None


def usual_scale(scales: bool) -> float | None:
    """The usual scale of scores, which is None, or 1 where they are left alone."""
    return None if scales else 1.0


def before_or_sum(is_before: bool) -> str:
    """Where norms stand: before attention and MLP, or after their sums with x."""
    return "before" if is_before else "sum"


def or_four_times(width: int | None, embed: int) -> int:
    """The width, or 4 times that of the embedding where there is none."""
    return 4 * embed if width is None else width


def four_times(width: int) -> int:
    """4 times the width."""
    return 4 * width


def interleaved_rope(dim: int) -> Rope:
    """A rope that turns `dim` dimensions in neighbouring pairs."""
    return Rope(dim=dim, interleaved=True)


def falcon_kv_heads(kv: int | None, heads: int, grouped: bool, single: bool) -> int:
    """Key heads of Falcon: as told where `grouped`, else one or as many as heads."""
    if grouped:
        return heads if kv is None else kv
    return 1 if single else heads


def falcon_residual(parallel: bool, grouped: bool, norms: int | None) -> Residual:
    """Falcon's block: one after the other, or side by side behind one norm or two."""
    if grouped and not parallel:
        raise ValueError("must be true where new_decoder_architecture is")
    if not grouped and norms not in (None, 1):
        raise ValueError(f"num_ln_in_parallel_attn must be null here, got {norms!r}")
    has_two = grouped and norms in (None, 2)
    return Residual(parallel=parallel, shared=parallel and not has_two)


def total(first: int, second: int) -> int:
    """The sum of two sizes."""
    return first + second


def product(first: int, second: int) -> int:
    """The product of two sizes."""
    return first * second


def first_layers(count: int) -> tuple[int, ...]:
    """The numbers of the first layers."""
    return tuple(range(count))


def dense_layers(
    step: int, listed: Sequence[int] | None, layers: int
) -> tuple[int, ...]:
    """Layers without experts: those listed, and all but every `step`-th."""
    dense = {*(listed or ())}
    return tuple(i for i in range(layers) if i in dense or (i + 1) % step)


def stated(number: int | None) -> int:
    """The number, which transformers has no default for."""
    if number is None:
        raise ValueError("must be a number, got null")
    return number


GREEDY, LIMITED = "greedy", "group_limited_greedy"


def limited(method: str, groups: int | None) -> int:
    """How many groups there are; one where experts are chosen among all."""
    return stated(groups) if method == LIMITED else 1
