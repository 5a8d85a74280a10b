"""What the package compressed-tensors reads of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def decompressed(source: Path, quantized: Path) -> Any:
    """The model of transformers with the weights that the package decompresses of `quantized`, which was made of
    `source`.
    """
    described = json.loads((quantized / "config.json").read_text())["quantization_config"]
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    apply_quantization_config(model, QuantizationConfig.model_validate(described))
    compressor: Any = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    left = model.load_state_dict(load_file(quantized / "model.safetensors"), strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"lm_head.weight"}  # it may be the embedding
    compressor.decompress_model(model)
    return model
