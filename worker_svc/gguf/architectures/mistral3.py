"""Ministral 3, whose queries grow with their positions, and Mistral Small 3.1 and 3.2: files have the text model."""

from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, read_decoder
from worker_svc.gguf.metadata import GgufMetadata


def _read_config(metadata: GgufMetadata) -> Any:
    beta = metadata.get("attention.temperature_scale")
    if not beta:
        return read_decoder(metadata, ConfigForm("mistral"))
    config = read_decoder(metadata, ConfigForm("ministral3"))
    rope = config.rope_parameters
    rope["llama_4_scaling_beta"] = float(beta)
    if rope["rope_type"] != "yarn":
        raise metadata.not_read("rope.scaling.type", "attention.temperature_scale")
    if (weight := metadata.get("rope.scaling.yarn_log_multiplier")) and rope["factor"] > 1:
        # llama.cpp takes the other weight to be 1.
        rope |= {"mscale": 1.0, "mscale_all_dim": float(weight)}
        del rope["attention_factor"]
    return config


ARCHITECTURE = GgufArchitecture(_read_config, has_rotated_neighbours=True)
