"""A config of every registered family of decoders, in the sizes that transformers has by default, with two layers."""

from typing import Any

from worker_svc.model.architecture import architecture_names, architecture_of, describe
from worker_svc.model.config import UnsupportedModel


def family_configs(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By model type; those of `known` as they are there. Encoders have none: a GPU serves no encoder by kernels."""
    found = {}
    for name in architecture_names():
        config = known.get(name) or _config_of(name)
        if config is not None:
            found[name] = config
    return found


def _config_of(model_type: str) -> dict[str, Any] | None:
    # Here, because it takes seconds
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    architecture = architecture_of(model_type)
    # The module of a type with a hyphen has an underscore there.
    name = next((name for name in (model_type, model_type.replace("_", "-")) if name in CONFIG_MAPPING), None)
    if architecture is None or name is None:
        return None
    config: Any = AutoConfig.for_model(name)
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-2:]
    config.architectures = [architecture.class_name]
    try:
        if describe(config) is None:
            return None
    except UnsupportedModel as error:
        raise ValueError(f"{model_type}: the default sizes are not supported: {error}") from error
    raw: dict[str, Any] = config.to_dict()
    return raw
