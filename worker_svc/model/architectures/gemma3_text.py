"""Gemma 3 without images: norms of queries and keys, and layers with a window have rotary positions of another base."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_gemma import describe_gemma
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    # transformers does not use `attn_logit_softcapping` of these models.
    return describe_gemma(config, qk_norm=True)


ARCHITECTURE = Architecture.of_decoder(__file__, "Gemma3Text", _describe, generating_class="Gemma3ForCausalLM")
