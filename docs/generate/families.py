"""The table of docs/results/families.md: `python -m docs.generate.families` writes it anew."""

from pathlib import Path
from typing import Any

from dew.converters.families import FAMILIES
from dew.nn.config import EncoderConfig, MoE
from tests.converters.families.decoders import TINY

PAGE = Path(__file__).parents[1] / "results" / "families.md"
START = "| family |"
COLUMNS = ("family", "norm", "block", "positions", "attention", "feed-forward")


def table() -> str:
    """The families and what the config of each in the tests says of them."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for name in sorted(FAMILIES):
        tiny = TINY[name]
        config = FAMILIES[name].read(tiny.config(**tiny.fields).to_dict())
        rows.append((f"`{name}`", *features(config)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def features(config: Any) -> tuple[str, ...]:
    """What stands in the columns after the name."""
    norm = config.norm.kind + (", 1 + w" if config.norm.offset else "")
    norm += "" if config.norm.scaled else ", no weights"
    block = "parallel" if config.residual.parallel else config.residual.norms
    if type(config) is EncoderConfig:
        block = "encoder, " + ("after the sum" if block == "sum" else block)
        block += ", shared" if config.shared else ""
    return norm, block, positions(config), attention(config), feed_forward(config)


def positions(config: Any) -> str:
    """How a token knows where it stands."""
    a = config.attention
    named = {
        "learned": config.embedding.positions,
        "ALiBi": a.alibi,
        "rope": a.rope,
        "part of a head": a.rope and a.rope.dim < a.head_dim and not a.latent,
        "neighbours": a.rope and a.rope.interleaved,
        "another in windows": a.local_rope,
        "none in some layers": any(a.no_rope_layers),
    }
    return ", ".join(name for name, has in named.items() if has)


def attention(config: Any) -> str:
    """What attention has beside queries, keys and values."""
    a = config.attention
    named = {
        "latent": a.latent,
        "windows": a.windows,
        "biases": a.qkv_bias,
        f"q/k norm ({a.qk_norm.shared_by if a.qk_norm else ''})": a.qk_norm,
        "sinks": a.sinks,
        "cap": a.softcap,
        "clip": a.clip,
    }
    return ", ".join(name for name, has in named.items() if has)


def feed_forward(config: Any) -> str:
    """What the feed-forward part is."""
    mlp = config.mlp
    if type(mlp) is not MoE:
        return mlp.activation + ("" if mlp.gated else ", no gate")
    named = {
        "experts": True,
        "shared": mlp.shared,
        "groups": mlp.groups > 1,
        "dense layers": config.dense_layers,
        "clamped gate": mlp.clamp,
    }
    return ", ".join(name for name, has in named.items() if has)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{table()}\n{after}", encoding="utf-8")
