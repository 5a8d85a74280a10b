"""Models in formats of quantized weights: weights are rounded to codes, and the codes stored as the formats define.

A word of a format is written bit by bit, or code by code, from the definition; nothing here is the code that is tested.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Ints = NDArray[np.int64]
Quantize = Callable[[str, Tensor], tuple[Mapping[str, Tensor], Tensor] | None]
"""Takes a layer and its weight [outputs, inputs]. Returns the tensors that replace the weight, and the weight that they
mean; None: the layer is left as it is.
"""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight as numbers: each is (code - zero) x scale of its group."""

    bits: int
    codes: Ints
    """[inputs, outputs]."""
    zeros: Ints
    """[groups, outputs]."""
    scales: NDArray[np.float16]
    """[groups, outputs]."""
    groups: Ints
    """[inputs]: the group of each input."""

    def dense(self) -> Tensor:
        """float16 [outputs, inputs]."""
        steps = (self.codes - self.zeros[self.groups]).astype(np.float16)
        return torch.from_numpy((steps * self.scales[self.groups]).T.copy())

    def gptq(self, layer: str, *, v2: bool = False) -> dict[str, Tensor]:
        """The tensors of GPTQ; zero points are stored less 1, but not in version 2."""
        stored = self.zeros if v2 else (self.zeros - 1) % 2**self.bits
        return {
            f"{layer}.qweight": bit_stream(self.codes.T, self.bits).t().contiguous(),
            f"{layer}.qzeros": bit_stream(stored, self.bits),
            f"{layer}.scales": torch.from_numpy(self.scales),
            f"{layer}.g_idx": torch.from_numpy(self.groups.astype(np.int32)),
        }

    def packed(self, layer: str, *, sym: bool, act_order: bool = False) -> dict[str, Tensor]:
        """The tensors of compressed-tensors' layout pack-quantized: codes along inputs, zero points along outputs."""
        inputs, outputs = self.codes.shape
        tensors = {
            f"{layer}.weight_packed": bit_stream(_in_words(self.codes.T, self.bits), self.bits),
            f"{layer}.weight_scale": torch.from_numpy(self.scales.T.copy()),
            f"{layer}.weight_shape": torch.tensor([outputs, inputs]),
        }
        if not sym:
            words = bit_stream(_in_words(self.zeros, self.bits), self.bits)
            tensors[f"{layer}.weight_zero_point"] = words.t().contiguous()
        return tensors | (self._order(layer) if act_order else {})

    def in_bytes(self, layer: str, *, sym: bool, act_order: bool = False) -> dict[str, Tensor]:
        """The tensors of compressed-tensors' layout int-quantized: signed codes and zero points of 8 bits."""
        tensors = {
            f"{layer}.weight": self._signed(self.codes),
            f"{layer}.weight_scale": torch.from_numpy(self.scales.T.copy()),
        }
        if not sym:
            tensors[f"{layer}.weight_zero_point"] = self._signed(self.zeros)
        return tensors | (self._order(layer) if act_order else {})

    def _signed(self, codes: Ints) -> Tensor:
        return torch.from_numpy((codes - 2 ** (self.bits - 1)).T.astype(np.int8, order="C"))

    def _order(self, layer: str) -> dict[str, Tensor]:
        return {f"{layer}.weight_g_idx": torch.from_numpy(self.groups.astype(np.int32))}

    def awq(self, layer: str) -> dict[str, Tensor]:
        """The tensors of AWQ's version `gemm`, of 4 bits."""
        return {
            f"{layer}.qweight": awq_words(self.codes),
            f"{layer}.qzeros": awq_words(self.zeros),
            f"{layer}.scales": torch.from_numpy(self.scales),
        }


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight as numbers: each is code x scale of its block."""

    codes: Tensor
    """float8_e4m3fn [outputs, inputs]."""
    scales: Tensor
    """[rows, columns] of blocks."""
    block: tuple[int, int]

    def dense(self) -> Tensor:
        """[outputs, inputs], in the dtype of the scales."""
        outputs, inputs = self.codes.shape
        scales = self.scales.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return self.codes.to(self.scales.dtype) * scales[:outputs, :inputs]


def quantize_fp8(weight: Tensor, block: tuple[int, int] | None, dtype: torch.dtype = torch.float32) -> Fp8Weight:
    """Rounds a weight [outputs, inputs] to FP8, with a scale in `dtype` for each block; None: one for all."""
    outputs, inputs = weight.shape
    rows, columns = block or (outputs, inputs)
    scales = torch.empty(-(-outputs // rows), -(-inputs // columns), dtype=dtype)
    codes = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            place = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scales[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[row, column].float()).clamp(-448, 448).to(codes.dtype)
    return Fp8Weight(codes, scales, (rows, columns))


def in_order(inputs: int, group_size: int) -> Ints:
    """Groups of neighbouring inputs; -1: one group."""
    return np.arange(inputs) // (inputs if group_size == -1 else group_size)


def in_act_order(inputs: int, group_size: int, seed: int = 0) -> Ints:
    """Groups of inputs that are neighbours in another order than that in which they are stored."""
    order = np.random.default_rng(seed).permutation(inputs)
    groups = np.empty(inputs, np.int64)
    groups[order] = in_order(inputs, group_size)
    return groups


def quantize(weight: Tensor, bits: int, groups: Ints, *, sym: bool) -> QuantizedWeight:
    """Rounds a weight [outputs, inputs] to codes, with a scale and zero point for each output and group."""
    numbers = weight.float().numpy().T
    largest = 2**bits - 1
    zeros = np.empty((groups.max() + 1, numbers.shape[1]), np.int64)
    scales = np.empty(zeros.shape, np.float16)
    for group in range(len(zeros)):
        members = numbers[groups == group]
        low, high = np.minimum(members.min(0), 0), np.maximum(members.max(0), 0)
        if sym:
            high = np.maximum(-low, high)
            low = -high
        scales[group] = (high - low) / largest
        zeros[group] = (largest + 1) // 2 if sym else np.round(-low / scales[group].astype(np.float32))
    zeros = zeros.clip(0, largest)
    codes = np.round(numbers / scales.astype(np.float32)[groups]).astype(np.int64) + zeros[groups]
    return QuantizedWeight(bits, codes.clip(0, largest), zeros, scales, groups)


def bit_stream(codes: Ints, bits: int) -> Tensor:
    """Codes [rows, n] as int32 words [rows, n x bits / 32]: their bits one after another, the lowest first."""
    stream = (codes[:, :, None] >> np.arange(bits) & 1).reshape(len(codes), -1, 32)
    return torch.from_numpy((stream << np.arange(32)).sum(-1).astype(np.uint32).view(np.int32))


def _in_words(codes: Ints, bits: int) -> Ints:
    """Codes [rows, n] and zeros after them, so that words are full."""
    return np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))


def awq_words(codes: Ints) -> Tensor:
    """Codes [rows, n] of 4 bits as int32 words [rows, n / 8]: first the even ones of eight, then the odd ones."""
    eights = codes.reshape(len(codes), -1, 8)
    words = sum(eights[..., place] << 4 * nibble for nibble, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def compressed_config(layout: str, bits: int, group_size: int, *, sym: bool) -> dict[str, Any]:
    """The quantization_config of compressed-tensors, of all linear layers in groups of inputs."""
    fields = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": group_size}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}},
    }


def with_dense_head(quantize: Quantize) -> Quantize:
    """Leaves the head as it is."""
    return lambda layer, weight: None if layer == "lm_head" else quantize(layer, weight)


def save_quantized(directory: Path, packed: Path, quantize: Quantize, **config: Any) -> Path:
    """Quantizes a model: `packed` gets the model with the tensors of `quantize` and with `config` in its config.json,
    `directory` the weights that they mean. Returns `packed`.
    """
    dense = load_file(directory / "model.safetensors")
    stored = dict(dense)
    for name, weight in list(dense.items()):
        layer = name.removesuffix(".weight")
        if layer.endswith(("_proj", "lm_head")) and (made := quantize(layer, weight)) is not None:
            del stored[name]
            tensors, meant = made
            stored |= tensors
            dense[name] = meant.to(weight.dtype).contiguous()
    packed.mkdir()
    save_file(dense, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors")
    (packed / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    changed = json.loads((directory / "config.json").read_text()) | config
    (packed / "config.json").write_text(json.dumps(changed))
    return packed


_E2M1 = [
    (-1) ** (code >> 3) * ((code & 1) / 2 if not code >> 1 & 3 else (1 + (code & 1) / 2) * 2 ** ((code >> 1 & 3) - 1))
    for code in range(16)
]


@dataclass(frozen=True, slots=True)
class E2m1Numbers:
    """A weight as numbers: each is that of its code of e2m1 x scale of its group x factor."""

    codes: Ints
    """[outputs, inputs]."""
    scales: Tensor
    """float32 [outputs, groups]: powers of two, or numbers of float8_e4m3fn."""
    factor: float

    def dense(self) -> Tensor:
        """float32 [outputs, inputs]."""
        numbers = torch.tensor(_E2M1)[torch.from_numpy(self.codes)].view(*self.scales.shape, -1)
        return (numbers * (self.scales * self.factor)[..., None]).flatten(1)

    def packed(self) -> Tensor:
        """uint8 [outputs, inputs / 2]: the first of two codes in the lower half."""
        return torch.from_numpy((self.codes[:, ::2] | self.codes[:, 1::2] << 4).astype(np.uint8))

    def powers(self) -> Tensor:
        """uint8 [outputs, groups]: the exponent of each scale, more by 127."""
        return (self.scales.log2() + 127).to(torch.uint8)


def quantize_e2m1(weight: Tensor, group: int, *, powers_of_two: bool) -> E2m1Numbers:
    """Rounds a weight [outputs, inputs] to the nearest numbers of e2m1, with a scale for each group of inputs."""
    groups = weight.float().view(len(weight), -1, group)
    largest, factor = groups.abs().amax(2), 1.0
    if powers_of_two:
        scales = 2.0 ** (largest.log2().floor() - 2)
    else:
        factor = float(torch.tensor(float(largest.max()) / 6 / 448))
        scales = (largest / 6 / factor).to(torch.float8_e4m3fn).float()
    steps = (groups / (scales * factor)[..., None]).numpy()
    codes = np.abs(steps[..., None] - np.array(_E2M1)).argmin(-1).reshape(weight.shape)
    return E2m1Numbers(codes, scales, factor)
