"""Table of native families in docs/results/families.md.

python -m docs.generate.families    # rewrites the table
"""

from pathlib import Path

from dew.converters.families import FAMILIES
from dew.nn.config import EncoderConfig, MoE, TransformerConfig
from docs.generate.page import table_lines, write_table
from tests.converters.families.decoders import TINY

PAGE = Path(__file__).parents[1] / "results" / "families.md"
COLUMNS = ("family", "norm", "block", "positions", "attention", "feed-forward")


def table() -> list[str]:
    """Lists every family with the features that its tiny test config turns on."""
    rows = []
    for name in sorted(FAMILIES):
        tiny = TINY[name]
        config = FAMILIES[name].read(tiny.config(**tiny.fields).to_dict())
        rows.append((f"`{name}`", *features(config)))
    return table_lines(COLUMNS, rows)


def features(config: TransformerConfig) -> tuple[str, ...]:
    """Returns the cells of a family's row after its name."""
    norm = config.norm.kind + (", 1 + w" if config.norm.offset else "")
    norm += "" if config.norm.scaled else ", no weights"
    block = "parallel" if config.residual.parallel else config.residual.norms
    if isinstance(config, EncoderConfig):
        block = "encoder, " + ("after the sum" if block == "sum" else block)
        block += ", shared" if config.shared else ""
    return norm, block, positions(config), attention(config), feed_forward(config)


def positions(config: TransformerConfig) -> str:
    """Names the position encodings: learned, ALiBi, and variants of rotary ones."""
    a = config.attention
    names = {
        "learned": config.embedding.positions,
        "ALiBi": a.alibi,
        "rope": a.rope,
        "part of a head": a.rope and a.rope.dim < a.head_dim and not a.latent,
        "neighbours": a.rope and a.rope.interleaved,
        "another in windows": a.local_rope,
        "none in some layers": any(a.no_rope_layers),
    }
    return ", ".join(name for name, is_used in names.items() if is_used)


def attention(config: TransformerConfig) -> str:
    """Names what attention has beyond queries, keys and values without biases."""
    a = config.attention
    shared_by = a.qk_norm.shared_by if a.qk_norm else ""
    names = {
        "latent": a.latent,
        "windows": a.windows,
        "biases": a.qkv_bias,
        f"q/k norm ({shared_by})": a.qk_norm,
        "sinks": a.sinks,
        "cap": a.softcap,
        "clip": a.clip,
    }
    return ", ".join(name for name, is_used in names.items() if is_used)


def feed_forward(config: TransformerConfig) -> str:
    """Names the activation of an MLP, or the parts of a mixture of experts."""
    mlp = config.mlp
    if not isinstance(mlp, MoE):
        return mlp.activation + ("" if mlp.gated else ", no gate")
    names = {
        "experts": True,
        "shared": mlp.shared,
        "groups": mlp.groups > 1,
        "dense layers": config.dense_layers,
        "clamped gate": mlp.clamp,
    }
    return ", ".join(name for name, is_used in names.items() if is_used)


if __name__ == "__main__":
    write_table(PAGE, table())
