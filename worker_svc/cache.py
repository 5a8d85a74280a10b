"""The KV cache: the layout of a block, and each layer's view of all blocks.

A block is one contiguous piece over all layers, with its scales if it is in 8 bits. So a copy or swap of a block is one
copy of its bytes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_kernels.cpu.large_pages import zeros_in_large_pages
from worker_svc.model_layout import ModelLayout

_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's views: keys and values [num_blocks, num_kv_heads, block_size, head_dim].

    In 8 bits these are codes, with float32 scales [num_blocks, num_kv_heads, block_size] as in
    `quire_kernels.kv_quantization`; otherwise there are no scales.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


@dataclass(frozen=True, slots=True)
class KVCache:
    """Views of one piece of memory: as blocks of bytes, and as keys, values and scales."""

    blocks: Tensor
    """uint8 [num_blocks, block_bytes], contiguous: what copies and swaps move."""
    values: Tensor
    """[num_blocks, num_layers, 2 (keys, values), num_kv_heads, block_size, head_dim]; 1 in place of 2 where keys are
    the values too."""
    scales: Tensor | None = None
    """float32 [num_blocks, num_layers, 2 or 1, num_kv_heads, block_size], where the values are codes of 8 bits."""

    @classmethod
    def over(cls, values: Tensor) -> "KVCache":
        """The cache over a contiguous tensor, without scales."""
        return cls(values.view(len(values), -1).view(torch.uint8), values)

    @property
    def num_layers(self) -> int:
        """Layers with attention."""
        return self.values.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.values.shape[4]

    @property
    def head_dim(self) -> int:
        """Dimensions of a key."""
        return self.values.shape[5]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def layer(self, layer: int) -> LayerCache:
        """The views of one layer."""
        scales = (None, None) if self.scales is None else (self.scales[:, layer, 0], self.scales[:, layer, -1])
        return LayerCache(self.values[:, layer, 0], self.values[:, layer, -1], *scales)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The layout of a block. In 8 bits it holds codes, then all scales."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    keys_hold_values: bool = False
    """Keys are the values too, and are stored once."""

    @classmethod
    def of(cls, layout: ModelLayout, block_size: int, dtype: torch.dtype) -> "CacheShape":
        """The layout for a model."""
        return cls(len(layout.layers), layout.num_kv_heads, block_size, layout.head_dim, dtype, layout.keys_hold_values)

    @classmethod
    def of_one_layer(cls, layout: ModelLayout, block_size: int, dtype: torch.dtype) -> "CacheShape":
        """The layout for one layer of a model, which each layer may overwrite where a step has whole sequences."""
        return replace(cls.of(layout, block_size, dtype), num_layers=1)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._value_bytes + self._scale_bytes

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """A cache of zeros. On a CPU the system allocates its memory when blocks are written, or when a `Prefault`
        runs.
        """
        if device.type == "cpu":
            blocks = self.allocate_host(num_blocks)
        else:
            blocks = torch.zeros((num_blocks, self.block_bytes), dtype=torch.uint8, device=device)
        shape = (num_blocks, self.num_layers, self._num_kinds, self.num_kv_heads, self.block_size)
        # Views, though a block's values end before its bytes do
        values = blocks[:, : self._value_bytes].view(self.dtype).view(*shape, self.head_dim)
        if not self._scale_bytes:
            return KVCache(blocks, values)
        return KVCache(blocks, values, blocks[:, self._value_bytes :].view(torch.float32).view(shape))

    def allocate_host(self, num_blocks: int) -> Tensor:
        """Blocks of bytes, uint8 [num_blocks, block_bytes], zeros. The system allocates their memory when they are
        written.
        """
        return zeros_in_large_pages(num_blocks * self.block_bytes).view(num_blocks, self.block_bytes)

    @property
    def _num_kinds(self) -> int:
        """Keys and values, or keys alone."""
        return 1 if self.keys_hold_values else 2

    @property
    def _num_vectors(self) -> int:
        """Keys and values of one head in a block."""
        return self._num_kinds * self.num_layers * self.num_kv_heads * self.block_size

    @property
    def _value_bytes(self) -> int:
        return self._num_vectors * self.head_dim * self.dtype.itemsize

    @property
    def _scale_bytes(self) -> int:
        return self._num_vectors * _SCALE_BYTES if self.dtype.itemsize == 1 else 0
