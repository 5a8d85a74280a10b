"""Every registered family of decoders and encoders, in the sizes that transformers has by default, with two layers."""

from typing import Any

from worker_svc.errors import UnsupportedModel
from worker_svc.model.architecture import AnyDescription, architecture_names, architecture_of, describe_any
from worker_svc.model.description import ModelDescription
from worker_svc.model.encoder_description import EncoderDescription

# Of types whose default sizes are not described.
_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "electra": {"embedding_size": 256},
    "gemma4_unified_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"num_local_experts": 0, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
}


def family_configs(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The configs of decoders by model type; those of `known` as they are there."""
    found = {}
    for name in architecture_names():
        if name in known:
            found[name] = known[name]
        elif (family := _family_of(name)) is not None and generates(family[1]):
            found[name] = family[0]
    return found


def generates(description: AnyDescription) -> bool:
    """Whether a model may generate tokens."""
    return isinstance(description, ModelDescription) and not description.is_bidirectional


def encoder_descriptions(known: dict[str, dict[str, Any]]) -> dict[str, EncoderDescription]:
    """The descriptions of encoders by model type; those of `known` are decoders."""
    families = {name: _family_of(name) for name in architecture_names() if name not in known}
    return {
        name: family[1]
        for name, family in families.items()
        if family is not None and isinstance(family[1], EncoderDescription)
    }


def _family_of(model_type: str) -> tuple[dict[str, Any], AnyDescription] | None:
    """A config and its description; None: transformers has no such type, or its default sizes are not described."""
    # Here, because it takes seconds
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    architecture = architecture_of(model_type)
    # The module of a type with a hyphen has an underscore there.
    name = next((name for name in (model_type, model_type.replace("_", "-")) if name in CONFIG_MAPPING), None)
    if architecture is None or name is None:
        return None
    config: Any = AutoConfig.for_model(name, **_OTHER_SIZES.get(model_type, {}))
    config.num_hidden_layers = 2
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None):
            setattr(config, kinds, getattr(config, kinds)[-2:])
    config.architectures = [architecture.class_name]
    try:
        description = describe_any(config)
    except UnsupportedModel as error:
        raise ValueError(f"{model_type}: the default sizes are not supported: {error}") from error
    return None if description is None else (config.to_dict(), description)
