"""MPNet, such as all-mpnet-base-v2: BERT with tokens of one type, whose attention depends on distances, too."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import EncoderNames, HeadNames, describe_encoder
from worker_svc.model.encoder_description import EncoderDescription, RelativePositions

_NAMES = EncoderNames(
    "mpnet",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)


def _describe(config: Any) -> EncoderDescription | None:
    if config.relative_attention_num_buckets != 32:  # transformers computes 32, whatever the table has
        return None
    distances = RelativePositions("encoder.relative_attention_bias.weight", num_buckets=32, max_distance=128)
    # Positions begin after that of padding, which is 1 whatever the config says.
    return describe_encoder(config, _NAMES, HeadNames(), num_types=0, first_position=2, relative_positions=distances)


ARCHITECTURE = Architecture.of_encoder(__file__, "MPNet", _describe)
