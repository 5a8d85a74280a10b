"""The checkpoints that are compared: the tool that writes each, its options, and Quire's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GROUP_SIZE = 64  # of which the widths of the default model's layers are multiples


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. `tool` is a package of the environment `environment`, and `kernels` the one that computes it."""

    title: str
    tool: str
    environment: str
    kernels: str
    scheme: Mapping[str, Any]
    quantization: str
    """Quire's, which keeps the codes."""
    activations_too: str | None = None
    """Quire's by which activations are rounded as well; None: those of the tool are not compared."""


def _gptqmodel(title: str, tool: str, scheme: Mapping[str, Any], quantization: str) -> Checkpoint:
    return Checkpoint(title, tool, "gptqmodel", "gptqmodel", scheme, quantization)


def _auto_round(title: str, bits: int, *, symmetric: bool, layout: str, quantization: str) -> Checkpoint:
    return _gptqmodel(title, "auto-round", {"bits": bits, "sym": symmetric, "format": layout}, quantization)


def _compressed(
    title: str, scheme: Mapping[str, Any], quantization: str, activations_too: str | None = None
) -> Checkpoint:
    what, tool = f"compressed-tensors, {title}", "llmcompressor"
    return Checkpoint(what, tool, tool, "compressed-tensors", scheme, quantization, activations_too)


def _bitsandbytes(title: str, scheme: Mapping[str, Any], quantization: str) -> Checkpoint:
    tool = "bitsandbytes"
    return Checkpoint(f"{tool}, {title}", tool, tool, tool, scheme, quantization)


def _weights(bits: int, *, symmetric: bool) -> Mapping[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": _GROUP_SIZE}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


CHECKPOINTS: Mapping[str, Checkpoint] = {
    "gptq-4": _auto_round("GPTQ, 4 bits", 4, symmetric=True, layout="auto_gptq", quantization="w4a16"),
    # gptqmodel reads zero points only of files that it has written.
    "gptq-4-act-order": _gptqmodel(
        "GPTQ, 4 bits, zero points, act-order", "gptqmodel", {"bits": 4, "sym": False, "desc_act": True}, "w4a16"
    ),
    "gptq-8": _auto_round("GPTQ, 8 bits", 8, symmetric=True, layout="auto_gptq", quantization="w8a16"),
    "awq-4": _auto_round("AWQ, 4 bits, zero points", 4, symmetric=False, layout="auto_awq", quantization="w4a16"),
    "w4a16": _compressed("W4A16", _weights(4, symmetric=True), "w4a16"),
    "w4a16-zeros": _compressed("W4A16, zero points", _weights(4, symmetric=False), "w4a16"),
    "w8a16": _compressed("W8A16", _weights(8, symmetric=True), "w8a16"),
    "w8a8": _compressed("W8A8", {"targets": "Linear", "scheme": "W8A8"}, "w8a16", "w8a8"),
    "fp8": _compressed("FP8", {"targets": "Linear", "scheme": "FP8_DYNAMIC"}, "none"),
    "nvfp4": _compressed("NVFP4", {"targets": "Linear", "scheme": "NVFP4A16"}, "w4a16"),
    "mxfp4": _compressed("MXFP4", {"targets": "Linear", "scheme": "MXFP4A16"}, "w4a16"),
    "nf4": _bitsandbytes(
        "nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "none"
    ),
}
