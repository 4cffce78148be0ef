"""Every field of PEFT's adapter_config.json: used, without effect here, or refused."""

from collections.abc import Mapping
from typing import Any

from dew.converters.config.fields import Field, Inert, Only, Read, Reading, Use
from dew.converters.lora.config import Lora

CONFIG = "adapter_config.json"


def _several(names: Any) -> Any:
    return names if type(names) is str else tuple(names or ())


def _floats(found: Any) -> dict[str, float]:
    return {name: float(number) for name, number in (found or {}).items()}


FIELDS: Mapping[str, Field] = {
    "r": Use("rank", 8),
    "lora_alpha": Use("alpha", 8.0, read=float),
    "target_modules": Use("targets", None, read=_several),
    "exclude_modules": Use("exclude", None, read=_several),
    "lora_dropout": Use("dropout", 0.0),
    "use_rslora": Use("rslora", False),
    "modules_to_save": Use("to_save", None, read=_several),
    "rank_pattern": Use("rank_pattern", None, read=lambda found: dict(found or {})),
    "alpha_pattern": Use("alpha_pattern", None, read=_floats),
    "base_model_name_or_path": Read("", nullable=True),
    "revision": Read("", nullable=True),
    "ensure_weight_tying": Read(False),
    "peft_type": Only("LORA"),
    "bias": Only("none"),
    "lora_bias": Only(False),
    "use_dora": Only(False),
    "use_qalora": Only(False),
    "use_bdlora": Only(None),
    "layers_to_transform": Only(None, []),
    "layer_replication": Only(None, []),
    "target_parameters": Only(None, []),
    "trainable_token_indices": Only(None),
    "alora_invocation_tokens": Only(None),
    "megatron_config": Only(None),
    "loftq_config": Only({}, None),
    **{
        f"{kind}_config": Only(None)
        for kind in (
            *("arrow", "corda", "eva", "kasa", "lora_ga", "monteclora", "velora"),
        )
    },
    # Starts that leave the base's weights as they are; others change them on loading.
    "init_lora_weights": Only(True, False, "gaussian", "orthogonal"),
    # How torch's own matrix lies, which it knows better; and what says nothing here.
    "fan_in_fan_out": Inert(False),
    "layers_pattern": Inert(),
    "qalora_group_size": Inert(16),
    "megatron_core": Inert("megatron.core"),
    "task_type": Inert(),
    "inference_mode": Inert(False),
    "auto_mapping": Inert(),
    "peft_version": Inert(),
    "runtime_config": Inert(),
}
"""Every field of PEFT's LoraConfig: used, known to change nothing, or refused."""


def read_config(config: Mapping[str, Any], address: str) -> Lora:
    """Reads an adapter_config.json.

    Raises:
        ValueError: fields that are unknown or of a value that we do not reproduce; all
            of them are named.
    """
    reading = Reading(config=config, table=FIELDS)
    attributes = reading.attributes()
    reading.refuse_unknown((), ())
    if not attributes.get("targets"):
        reading.faults.append("target_modules must name modules, got none")
    if reading.faults:
        raise ValueError(
            f"{CONFIG} of {address} is not reproduced: " + "; ".join(reading.faults)
        )
    return Lora(**attributes)
