"""ELECTRA's discriminators: BERT with a head of RoBERTa's form."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import EncoderNames, HeadNames, describe_encoder
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.score_head_description import DenseActivation


def _describe(config: Any) -> EncoderDescription | None:
    if config.embedding_size != config.hidden_size:  # the small ones, which project their embeddings
        return None
    return describe_encoder(config, EncoderNames("electra"), HeadNames(activation=DenseActivation.GELU))


ARCHITECTURE = Architecture.of_encoder(__file__, "Electra", _describe, has_pre_training=True)
