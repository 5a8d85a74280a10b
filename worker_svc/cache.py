"""The KV cache: the layout of a block, and each layer's view of all blocks.

A block is one contiguous piece over all layers, with its scales if it is in 8 bits. So a copy or swap of a block is one
copy of its bytes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire_kernels.cpu.large_pages import zeros_in_large_pages
from worker_svc.model_layout import KVShape, ModelLayout

_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's views: keys and values [num_blocks, num_kv_heads, block_size, head_dim].

    In 8 bits these are codes, with float32 scales [num_blocks, num_kv_heads, block_size] as in
    `quire_kernels.kv_quantization`; otherwise there are no scales. Values that are the keys themselves are the same
    view.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVCache:
    """Views of one piece of memory: as blocks of bytes, and as keys, values and scales of each layer."""

    blocks: Tensor
    """uint8 [num_blocks, block_bytes], contiguous: what copies and swaps move."""
    layers: tuple[LayerCache, ...]

    @classmethod
    def over(cls, values: Tensor) -> "KVCache":
        """The cache over a contiguous tensor [num_blocks, num_layers, 2 (keys, values), num_kv_heads, block_size,
        head_dim], without scales.
        """
        layers = tuple(LayerCache(keys, values) for keys, values in (layer.unbind(1) for layer in values.unbind(1)))
        return cls(values.view(len(values), -1).view(torch.uint8), layers)

    def of_layers(self, layout: ModelLayout) -> list[LayerCache]:
        """What each layer of a model with attention reads; a cache of one layer is that of all of them."""
        return [self.layers[place if len(self.layers) > 1 else 0] for place in layout.kv_of_layers]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layers[0].keys.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, or of their codes."""
        return self.layers[0].keys.dtype

    @property
    def has_scales(self) -> bool:
        """Whether keys and values are codes of 8 bits."""
        return self.layers[0].key_scales is not None

    @property
    def device(self) -> torch.device:
        return self.blocks.device


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The layout of a block: of each layer the keys, then the values, and in 8 bits behind all of them the scales in
    the same order.
    """

    layers: tuple[KVShape, ...]
    block_size: int
    dtype: torch.dtype
    keys_hold_values: bool = False
    """Keys are the values too, and are stored once."""

    @classmethod
    def of(cls, layout: ModelLayout, block_size: int, dtype: torch.dtype) -> "CacheShape":
        """The layout for a model."""
        return cls(layout.kv, block_size, dtype, layout.keys_hold_values)

    @classmethod
    def of_equal_layers(
        cls,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        keys_hold_values: bool = False,
    ) -> "CacheShape":
        """The layout for layers of one shape."""
        return cls((KVShape(num_kv_heads, head_dim),) * num_layers, block_size, dtype, keys_hold_values)

    @classmethod
    def of_whole_sequences(cls, layout: ModelLayout, block_size: int, dtype: torch.dtype) -> "CacheShape":
        """The layout for steps of whole sequences: of one layer, which each layer may overwrite, unless they differ in
        their heads or share what they store.
        """
        shape = cls.of(layout, block_size, dtype)
        is_one = len(set(layout.kv)) == 1 and len(layout.kv) == len(layout.layers)
        return replace(shape, layers=shape.layers[:1]) if is_one else shape

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self._num_numbers * self.dtype.itemsize + self._num_scales * _SCALE_BYTES

    def allocate(self, num_blocks: int, device: torch.device) -> KVCache:
        """A cache of zeros. On a CPU the system allocates its memory when blocks are written, or when a `Prefault`
        runs.
        """
        if device.type == "cpu":
            blocks = self.allocate_host(num_blocks)
        else:
            blocks = torch.zeros((num_blocks, self.block_bytes), dtype=torch.uint8, device=device)
        return KVCache(blocks, tuple(self._views(blocks)))

    def allocate_host(self, num_blocks: int) -> Tensor:
        """Blocks of bytes, uint8 [num_blocks, block_bytes], zeros. The system allocates their memory when they are
        written.
        """
        return zeros_in_large_pages(num_blocks * self.block_bytes).view(num_blocks, self.block_bytes)

    def _views(self, blocks: Tensor) -> Iterator[LayerCache]:
        number_bytes = self._num_numbers * self.dtype.itemsize
        # Views, though a block's numbers end before its bytes do
        numbers, scales = blocks[:, :number_bytes].view(self.dtype), blocks[:, number_bytes:].view(torch.float32)
        first_number = first_scale = 0
        for shape in self.layers:
            vectors = self._num_kinds, shape.num_heads, self.block_size
            num_vectors = math.prod(vectors)
            stored = numbers[:, first_number : first_number + num_vectors * shape.head_dim]
            kinds = stored.view(len(blocks), *vectors, shape.head_dim)
            first_number += num_vectors * shape.head_dim
            if not self._num_scales:
                yield LayerCache(kinds[:, 0], kinds[:, -1])
                continue
            of_kinds = scales[:, first_scale : first_scale + num_vectors].view(len(blocks), *vectors)
            first_scale += num_vectors
            yield LayerCache(kinds[:, 0], kinds[:, -1], of_kinds[:, 0], of_kinds[:, -1])

    @property
    def _num_kinds(self) -> int:
        """Keys and values, or keys alone."""
        return 1 if self.keys_hold_values else 2

    @property
    def _num_numbers(self) -> int:
        """Numbers of a block, or codes: so many that blocks are whole pages of a head apart, in each layer."""
        page = math.lcm(*(self.block_size * shape.head_dim for shape in self.layers))
        num = self._num_kinds * self.block_size * sum(shape.num_heads * shape.head_dim for shape in self.layers)
        return -(-num // page) * page

    @property
    def _num_scales(self) -> int:
        if self.dtype.itemsize > 1:
            return 0
        return self._num_kinds * self.block_size * sum(shape.num_heads for shape in self.layers)
