"""StarCoder 2: LayerNorm, biases in all maps, MLPs without a gate."""

from dew.converters.config.fields import Inert, Read, Use
from dew.converters.config.rope import RopeFields
from dew.converters.config.transforms import same_window
from dew.converters.families import shared
from dew.converters.families.base import TIED_HEAD, Family
from dew.converters.mapping.rules import Rule
from dew.nn.activations import ACTIVATIONS
from dew.nn.config import MLP

FIELDS = {
    **shared.SIZES,
    "vocab_size": Use("vocab", 49152),
    "hidden_size": Use("embed", 3072),
    "num_hidden_layers": Use("layers", 30),
    "num_attention_heads": Use("attention.heads", 24),
    "num_key_value_heads": Use("attention.kv_heads", 2),
    "intermediate_size": Use("mlp.dim", 12288),
    "hidden_act": Use("mlp.activation", "gelu_pytorch_tanh", choices=ACTIVATIONS),
    "initializer_range": Use("init_std", 0.018042),
    "tie_word_embeddings": Use("head.tied", True),
    "max_position_embeddings": Read(4096),
    "norm_epsilon": Use("norm.eps", 1e-5),
    "use_bias": Use(("attention.qkv_bias", "attention.out_bias", "mlp.bias"), True),
    # Dropout rates: they change no logit.
    "residual_dropout": Inert(0.0),
    "embedding_dropout": Inert(0.0),
    "sliding_window": Use(
        "attention.windows",
        None,
        read=same_window,
        inputs=("num_hidden_layers",),
    ),
}

STARCODER2 = Family(
    model_type="starcoder2",
    architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
    fields=FIELDS,
    ropes=(RopeFields(),),
    parts={"mlp": MLP},
    constants={"norm.kind": "layer", "norm.bias": True, "mlp.gated": False},
    rules=(
        *shared.EMBED,
        *shared.ATTENTION,
        *shared.BEFORE,
        Rule(shared.LAYER + "mlp.c_fc.{kind}", "layers/{n}/mlp/up/{kind}"),
        Rule(shared.LAYER + "mlp.c_proj.{kind}", "layers/{n}/mlp/down/{kind}"),
    ),
    copies=(TIED_HEAD,),
)
