"""FP8: codes in float8_e4m3fn with a scale for the whole weight, or for each block of it.

Source: `Fp8Dequantize` and `FP8Linear` of transformers 5.23, `transformers/integrations/finegrained_fp8.py`, and
section 3.3 of arXiv:2412.19437. A scale for the whole weight is that of AutoFP8.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from worker_svc.model.formats._fields import Fields
from worker_svc.model.formats._grouped import SCALE_DTYPES, require_dtype
from worker_svc.model.formats._scaled import ScaledWeight, blocks, num_blocks
from worker_svc.model.formats._unread import UNREAD

_ALIAS = ".weight_scale_inv"  # a scale for each block is always called so, one for all of them sometimes


class Fp8Format:
    """A `WeightFormat` of two tensors for each layer: `weight`, `weight_scale`."""

    def __init__(self, block: tuple[int, int] | None) -> None:
        """Outputs and inputs of a block; None: the whole weight is one."""
        self._block = block

    def read_as(self, name: str) -> str | None:
        if name.endswith(UNREAD):
            return None
        return f"{name.removesuffix(_ALIAS)}.weight_scale" if name.endswith(_ALIAS) else name

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        scales: tuple[int, ...] = (1,)
        if self._block is not None:
            scales = num_blocks(outputs, self._block[0]), num_blocks(inputs, self._block[1])
        return {f"{layer}.weight": (outputs, inputs), f"{layer}.weight_scale": scales}

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> ScaledWeight:
        codes, scales = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
        require_dtype(f"{layer}.weight", codes, torch.float8_e4m3fn)
        require_dtype(f"{layer}.weight_scale", scales, *SCALE_DTYPES, torch.float8_e8m0fnu)
        rows, columns = self._block or (None, None)
        return ScaledWeight(
            codes,
            # The reference computes in float32, whatever the dtype of the scales.
            scales.float().view(num_blocks(codes.shape[0], rows), -1),
            None,
            blocks(codes.shape[0], rows),
            blocks(codes.shape[1], columns),
        )


def _make(quantization: Mapping[str, Any]) -> Fp8Format:
    fields = Fields(quantization)
    fields.word("fmt", ("e4m3",), "e4m3")
    fields.word("scale_fmt", ("float", "ue8m0"), "float")
    fields.word("expert_dtype", ("fp8",), "fp8")
    # Activations are not quantized, so neither scheme has an effect.
    fields.word("activation_scheme", ("dynamic", "static"), "dynamic")
    # The tensors themselves say which layers are quantized.
    for name in ("modules_to_not_convert", "ignored_layers"):
        fields.names(name)
    if fields.names("modules_to_convert"):
        raise fields.refuse("modules_to_convert", "null: only weights of linear layers are read in FP8")
    return Fp8Format(fields.block("weight_block_size"))


FORMAT = _make
