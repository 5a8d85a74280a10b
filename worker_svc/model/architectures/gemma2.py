"""Gemma 2: soft caps on attention scores and logits, and a window of keys in every other layer."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_gemma import describe_gemma
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    if config.use_bidirectional_attention:
        return None  # of which transformers makes no mask
    return describe_gemma(config, soft_cap=config.attn_logit_softcapping)


ARCHITECTURE = Architecture.of_decoder(__file__, "Gemma2", _describe)
