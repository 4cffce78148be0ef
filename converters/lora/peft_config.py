"""Every field of PEFT's adapter_config.json: used, without effect here, or refused."""

from collections.abc import Mapping
from typing import Any

from dew.converters.config.fields import Field, Inert, Only, Read, Reading, Use
from dew.converters.folder.folder import ADAPTER_CONFIG
from dew.converters.lora.config import Lora


def _names(names: Any) -> Any:
    return names if type(names) is str else tuple(names or ())


def _floats(value: Any) -> dict[str, float]:
    return {name: float(number) for name, number in (value or {}).items()}


FIELDS: Mapping[str, Field] = {
    "r": Use("rank", 8),
    "lora_alpha": Use("alpha", 8.0, read=float),
    "target_modules": Use("targets", None, read=_names),
    "exclude_modules": Use("exclude", None, read=_names),
    "lora_dropout": Use("dropout", 0.0),
    "use_rslora": Use("rslora", False),
    "modules_to_save": Use("to_save", None, read=_names),
    "rank_pattern": Use("rank_pattern", None, read=lambda value: dict(value or {})),
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
    # Initialisations that leave the base's weights unchanged; others change them.
    "init_lora_weights": Only(True, False, "gaussian", "orthogonal"),
    # The orientation of torch's matrix, derived from the model; fields without effect.
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
"""Fields of PEFT's LoraConfig: used, without effect here, or refused."""


def read_config(config: Mapping[str, object], address: str) -> Lora:
    """Returns the LoRA settings in the fields of an adapter_config.json.

    `address` names the adapter in messages.

    Raises:
        ValueError: fields are unknown, or have a value that is not reproduced here; the
            message lists all of them.
    """
    reading = Reading(config=config, table=FIELDS)
    attributes = reading.attributes()
    reading.refuse_others()
    if not attributes.get("targets"):
        reading.faults.append("target_modules must name modules, got none")
    if reading.faults:
        raise ValueError(
            f"{ADAPTER_CONFIG} of {address} is not reproduced: "
            + "; ".join(reading.faults)
        )
    return Lora(**attributes)
