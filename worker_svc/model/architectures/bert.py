"""BERT and models of its form, such as MiniLM: encoders with learnt positions and norms after each sum, and
cross-encoders and classifiers, which have a head on top.
"""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import EncoderNames, HeadNames, describe_encoder
from worker_svc.model.encoder_description import EncoderDescription


def _describe(config: Any) -> EncoderDescription | None:
    return describe_encoder(config, EncoderNames("bert"), HeadNames("bert.pooler.dense", "classifier"))


ARCHITECTURE = Architecture.of_encoder(__file__, "Bert", _describe, has_pre_training=True)
