"""Dequantizes GGUF files of architectures that transformers reads and Quire does not."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from worker_svc.gguf.config import ConfigForm, read_decoder
from worker_svc.gguf.metadata import GgufMetadata

_WEIGHT = ".weight"


def convert_by_transformers(metadata: GgufMetadata, directory: Path) -> Any:
    """Writes all weights in float32: no smaller type represents those of quantized ones exactly. Returns the config.

    Raises PreparationFailed for tensors or fields that transformers does not read, and ValueError for an architecture.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    gguf, config = metadata.gguf, _read_config(metadata)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, config=config, dtype=torch.float32, output_loading_info=True
    )
    model, loading = loaded
    # transformers makes up what is missing: biases are zeros, and other tensors random numbers.
    if missing := sorted(name for name in loading["missing_keys"] if not _is_zero(name, config)):
        raise metadata.refusal(f"it has no tensors for {', '.join(missing[:8])}")
    metadata.check_tensors_read(_names_read(model, metadata.architecture))
    # A model loaded from GGUF rejects save_pretrained, and its config would name GGUF again.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes it readable for its owner only
    return model.config


def _read_config(metadata: GgufMetadata) -> Any:
    """transformers' config, with the fields of the file that its reader skips."""
    from transformers import PreTrainedConfig

    found, _ = PreTrainedConfig.get_config_dict(metadata.gguf.parent, gguf_file=metadata.gguf.name)
    fields = {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
    config = read_decoder(metadata, ConfigForm(fields.pop("model_type"), fixed=fields))
    metadata.check_fields_read()
    return config


def _names_read(model: Any, architecture: str) -> Iterable[str]:
    """The names of the tensors in a GGUF file that transformers reads for a model."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor: Callable[..., Any] = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    names_in: Callable[..., dict[str, str]] = get_gguf_hf_weights_map
    names = names_in(model, processor(config=model.config.to_dict()))
    # Those of experts are without the ending.
    return {*names, *(f"{name}{_WEIGHT}" for name in names)}


def _is_zero(name: str, config: Any) -> bool:
    """Whether a tensor that a file does not have is a bias beside others: llama.cpp has them one by one, and
    transformers for all layers of a kind.
    """
    part = "mlp_bias" if ".mlp." in name else "attention_bias"
    return name.endswith(".bias") and bool(getattr(config, part, False))
