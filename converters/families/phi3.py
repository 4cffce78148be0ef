"""Phi 3 and 4: Llama with fused QKV and fused gate and up matrices."""

from dew.converters.config.fields import Inert, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import same_window
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    **shared.GROUPED,
    "vocab_size": Use("vocab", 32064),
    "hidden_size": Use("embed", 3072),
    "intermediate_size": Use("mlp.dim", 8192),
    "rms_norm_eps": Use("norm.eps", 1e-5),
    "max_position_embeddings": Read(4096),
    # Dropout rates: they change no logit.
    "resid_pdrop": Inert(0.0),
    "embd_pdrop": Inert(0.0),
    "sliding_window": Use(
        "attention.windows",
        None,
        read=same_window,
        inputs=("num_hidden_layers",),
    ),
}

PHI3 = Family(
    model_type="phi3",
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    fields=FIELDS,
    ropes=(
        RopeFields(
            partial=True,
            original_window=4096,
            # The first files spell longrope so.
            type_aliases={"su": "longrope", "yarn": "longrope"},
        ),
    ),
    parts={"mlp": MLP},
    rules=(*shared.EMBED, *shared.FUSED_QKV, *shared.FUSED_GATE, *shared.BEFORE),
    copies=(TIED_HEAD,),
)
