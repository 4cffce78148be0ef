"""The grid of configs that every family is tested with, in each spelling of files.

`cases_of(family)` follows from the family's row in
`tests/converters/families/decoders.py`: the sizes, biases and ties that its config
class has a field for, and every rope type in both spellings.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from dew.converters.families import FAMILIES
from tests.converters.families.decoders import TINY
from tests.converters.families.encoders import ENCODERS
from tests.support.sampling import daily_random

WINDOW, ORIGINAL = 64, 32
"""Maximum length that rope cases declare, and original length before scaling."""

THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)

BIASES = (
    "attention_bias",
    "bias",
    "enable_bias",
    "mlp_bias",
    "qkv_bias",
    "use_bias",
    "use_qkv_bias",
)

LATENT = ("deepseek_v2", "deepseek_v3")

FIXED: Mapping[tuple[str, str], str] = {
    **{
        (family, name): "latent attention has keys for every head, in sizes of its own"
        for family in LATENT
        for name in ("head_dim", "num_key_value_heads")
    },
    **{
        (family, "head_dim"): "the class computes it"
        for family in (
            *("bloom", "falcon", "gpt2", "gpt_neox", "gptj", "opt", "stablelm"),
            *ENCODERS,
        )
    },
    ("olmoe", "head_dim"): "norms of queries are as wide as the model",
}
"""Sizes that a family's config cannot change, and why."""

REFUSED: Mapping[tuple[str, str], str] = {
    **{
        ("phi3", kind): "Phi3Config takes default and longrope alone"
        for kind in ("linear", "dynamic", "yarn", "llama3", "proportional")
    },
    **{
        (family, "proportional"): "the class splits heads before it rotates them"
        for family in ("phi", "stablelm")
    },
}
"""Rope types that a family's transformers class cannot run, and why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One config: changes of the tiny one, and spellings of its rotary embedding.

    Each of `spellings` is joined to the fields and written as it is; without any,
    config.json is written by transformers.
    """

    name: str
    changes: Mapping[str, Any]
    spellings: tuple[Mapping[str, Any], ...] = ()


def cases_of(family: str) -> list[Case]:
    """All cases of a family."""
    axes = axes_of(family)
    cases = [Case(name="as it is", changes={})]
    cases += [Case(name=name, changes=changes) for name, changes in axes.items()]
    cases += mixed_cases(family, axes)
    return cases + list(rope_cases(family))


def case_of_today(family: str) -> Case:
    """One of a family's cases, drawn by the date."""
    return daily_random(family).choice(cases_of(family))


def axes_of(family: str) -> dict[str, Mapping[str, Any]]:
    """One change at a time, of fields that the family's config class has."""
    tiny = TINY[family]
    fields = tiny.config(**tiny.fields).to_dict()
    axes: dict[str, Mapping[str, Any]] = {}
    heads = fields.get("num_attention_heads", fields.get("n_head"))
    for name in ("num_key_value_heads", "num_kv_heads"):
        if name in fields and (family, name) not in FIXED:
            axes |= {f"{name} {n}": {name: n} for n in (1, 2, heads)}
    if (family, "head_dim") not in FIXED:
        axes |= {"head_dim 16": {"head_dim": 16}}
    flags = [n for n in (*BIASES, "tie_word_embeddings") if n in fields]
    axes |= {f"{n} {not fields[n]}": {n: not fields[n]} for n in flags}
    return axes | {
        " ".join(f"{n} {v}" for n, v in variant.items()): variant
        for variant in tiny.variants
    }


def mixed_cases(family: str, axes: Mapping[str, Mapping[str, Any]]) -> list[Case]:
    """Two cases with three random changes each, of families with more than three."""
    rng = random.Random(family)
    cases = []
    for i in range(2 if len(axes) > 3 else 0):
        sampled = rng.sample(sorted(axes), 3)
        changes = {n: v for name in sampled for n, v in axes[name].items()}
        cases.append(Case(name=f"mixed {i}: {', '.join(sampled)}", changes=changes))
    return cases


def rope_kinds(pairs: int) -> dict[str, Mapping[str, Any]]:
    """Rope dicts of every type, for heads with `pairs` rotated pairs."""
    original = {"original_max_position_embeddings": ORIGINAL}
    yarn = {"rope_type": "yarn", "factor": 4.0, **original}
    long = {
        "rope_type": "longrope",
        "short_factor": [1 + i / 8 for i in range(pairs)],
        "long_factor": [1.5 + i for i in range(pairs)],
        **original,
    }
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        **{f"default, theta {t:.0e}": {"rope_theta": t} for t in THETAS},
        "linear": {"rope_type": "linear", "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "yarn": yarn,
        "yarn, attention_factor": {**yarn, "attention_factor": 1.25},
        "yarn, mscale": {**yarn, "mscale": 1.0, "mscale_all_dim": 0.8},
        "yarn, truncate": {**yarn, "truncate": False, "beta_fast": 16.0},
        "llama3": {"rope_type": "llama3", **llama3, **original},
        "longrope": long,
        "longrope, attention_factor": {**long, "attention_factor": 1.1},
        "longrope, factor": {**long, "factor": 3.0},
        "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    }


def rope_cases(family: str) -> Iterator[Case]:
    """Every rope type, spelled as in transformers 4 and 5, with cycling thetas."""
    tiny = TINY[family]
    if "rope_parameters" not in tiny.config(**tiny.fields).to_dict():
        return
    base = rope_base(family)
    rope = FAMILIES[family].read({**tiny.fields, **base}).attention.rope
    thetas = cycle(THETAS)
    for name, facts in rope_kinds(rope.dim // 2).items():
        facts = {"rope_theta": next(thetas), **facts}
        if (family, name.partition(",")[0]) not in REFUSED:
            yield Case(name=name, changes=base, spellings=rope_spellings(family, facts))
    if family == "phi3":
        facts = {**rope_kinds(rope.dim // 2)["longrope"], "rope_theta": 1e4}
        old = {"rope_scaling": {**facts, "rope_type": "su"}}
        yield Case(
            name="longrope, su",
            changes={**base, "original_max_position_embeddings": ORIGINAL},
            spellings=(old,),
        )
    yield from layered_rope_cases(family, base)
    yield from partial_rope_cases(family, base)


def rope_base(family: str) -> dict[str, Any]:
    """Heads of 16, so that eight pairs are rotated, or fewer in partial RoPE.

    Mixtral's class leaves head_dim open, and its own rope types fail then.
    """
    fields = TINY[family].config(**TINY[family].fields).to_dict()
    if family in LATENT:
        return {"qk_rope_head_dim": 8, "max_position_embeddings": WINDOW}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_kv_heads": 1}
    base = {name: value for name, value in heads.items() if name in fields}
    if "head_dim" in fields:
        base["head_dim"] = 16
    return {**base, "max_position_embeddings": WINDOW}


LAYERED: Mapping[str, str | None] = {
    "gemma3_text": "rope_local_base_freq",
    "modernbert": "local_rope_theta",
    "olmo3": None,
}
"""Families whose windowed layers have their own rope, and its theta's field in
transformers 4."""


def rope_spellings(
    family: str, facts: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """The rope as transformers 4 writes it, and as transformers 5 does."""
    new: Mapping[str, Any] = {"rope_parameters": {"rope_type": "default", **facts}}
    if family in LAYERED:
        window = {"rope_type": "default", "rope_theta": 2e4}
        new = {
            "rope_parameters": {
                "full_attention": new["rope_parameters"],
                "sliding_attention": window,
            }
        }
    return old_spelling(family, facts), new


def old_spelling(family: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Spelling of version 4: theta and the rotated part beside `rope_scaling`."""
    tops = {
        "rope_theta": "rope_theta",
        "partial_rotary_factor": "partial_rotary_factor",
    }
    if family == "gpt_neox":
        tops = {
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        }
    if family == "modernbert":
        tops["rope_theta"] = "global_rope_theta"
    if family == "phi3":
        tops |= {"original_max_position_embeddings": "original_max_position_embeddings"}
    if facts.get("rope_type") == "proportional":
        del tops["partial_rotary_factor"]
    inner = {name: value for name, value in facts.items() if name not in tops}
    if inner.get("rope_type") in ("linear", "dynamic"):
        inner["type"] = inner.pop("rope_type")
    top = {tops[name]: value for name, value in facts.items() if name in tops}
    if LAYERED.get(family):
        top[str(LAYERED[family])] = 2e4
    return {**top, "rope_scaling": inner or None}


def layered_rope_cases(family: str, base: Mapping[str, Any]) -> Iterator[Case]:
    """Cases in which the windowed layers have the scaled rope."""
    if family not in LAYERED:
        return
    full = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    window = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    nested = {"full_attention": full, "sliding_attention": window}
    yield Case(
        name="a scaled rope in windows",
        changes=base,
        spellings=({"rope_parameters": nested},),
    )


def partial_rope_cases(family: str, base: Mapping[str, Any]) -> Iterator[Case]:
    """Cases with other rotated parts of a head, for families with partial RoPE."""
    if not any(rope.partial for rope in FAMILIES[family].ropes):
        return
    for fraction in (0.25, 0.5, 1.0):
        for kind in ("default", "linear", "yarn"):
            facts = {"rope_theta": 1e4, "partial_rotary_factor": fraction}
            if kind != "default":
                facts |= {"rope_type": kind, "factor": 4.0}
            if (family, kind) not in REFUSED:
                yield Case(
                    name=f"{kind}, part {fraction}",
                    changes=base,
                    spellings=rope_spellings(family, facts),
                )
