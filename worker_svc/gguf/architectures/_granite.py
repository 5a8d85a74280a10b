"""What Granite's files say of factors: of embeddings, of what layers add, of scores and of logits."""

from collections.abc import Callable, Mapping
from typing import Any

from worker_svc.gguf.config import ConfigForm, decoder
from worker_svc.gguf.metadata import GgufMetadata

# Their names in the config, of those that change nothing if they are 0.
_NAMES = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}


def granite(
    model_type: str, *, names: Mapping[str, str] | None = None, unused: tuple[str, ...] = ()
) -> Callable[[GgufMetadata], Any]:
    """Reads configs of this model type; `names` and `unused` are further ones of a `ConfigForm`."""
    return decoder(
        ConfigForm(
            model_type,
            names={"logit_scale": "logits_scaling", **(names or {})},
            # A file without positions says that they are not trained.
            required={"rope.scaling.finetuned": (None, True)},
            unused=unused,
            more=_factors,
        )
    )


def _factors(metadata: GgufMetadata) -> Mapping[str, Any]:
    width = metadata.needed("embedding_length") // metadata.needed("attention.head_count")
    return {
        "attention_multiplier": metadata.get("attention.scale") or width**-0.5,
        **{of_config: metadata.get(name) or 1.0 for name, of_config in _NAMES.items()},
    }
