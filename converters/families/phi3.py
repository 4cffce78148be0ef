"""Phi 3 and 4: Llama with fused matrices."""

from dew.converters.config.fields import Inert, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import same_window
from dew.converters.families import shared as parts
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **parts.SIZES,
    **parts.GROUPED,
    "vocab_size": Use("vocab", 32064),
    "hidden_size": Use("embed", 3072),
    "intermediate_size": Use("mlp.dim", 8192),
    "rms_norm_eps": Use("norm.eps", 1e-5),
    "max_position_embeddings": Read(4096),
    # Dropouts of training that change no logit.
    "resid_pdrop": Inert(0.0),
    "embd_pdrop": Inert(0.0),
    "sliding_window": Use(
        "attention.windows",
        None,
        read=same_window,
        beside=("num_hidden_layers",),
    ),
}

PHI3 = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    fields=FIELDS,
    ropes=(
        RopeFields(
            partial=True,
            original=4096,
            # Names of longrope in the first files.
            renamed={"su": "longrope", "yarn": "longrope"},
        ),
    ),
    parts={"mlp": MLP},
    rules=(*parts.EMBED, *parts.FUSED_QKV, *parts.FUSED_GATE, *parts.BEFORE),
    copies=(TIED_HEAD,),
    ignored=parts.IGNORED,
)
