"""Copies a step's inputs to the device and its sampled tokens back, through pinned memory: one copy for the forward
pass, one for sampling, one back.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Alignment of each array: Triton uses its widest loads there and compiles one kernel for all.
ALIGNMENT = 16
_NUM_BUFFERS = 2


class StreamEvent(Protocol):
    """An event of a stream, like torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Returns when the device has reached it."""


class _CompletedEvent:
    """For work that is done at once, as on a CPU."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def record(device: torch.device) -> StreamEvent:
    """An event at the current end of the device's stream."""
    if device.type != "cuda":
        return _CompletedEvent()
    # A waiting thread sleeps instead of spinning.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def pinned(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] on the host; a GPU copies to and from it asynchronously."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def pin(memory: Tensor) -> None:
    """Pins existing host memory, as long as this tensor is there.

    A pinned tensor of torch's takes the next power of two in bytes: too much for GiB. Raises RuntimeError if the system
    does not allow to pin so much.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, memory.nbytes, 0)))
    # Before the system has the memory back: CUDA would keep its pages, and take them for what is mapped there next. Not
    # at the end of the process, which CUDA may have left already.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


@dataclass(slots=True)
class StagingBuffer:
    """The host's memory of one step in flight. It is reused only when the device is done with that step."""

    inputs: Tensor
    outputs: Tensor
    done: StreamEvent


class Staging:
    """Two staging buffers on the host: for the step that runs and for the one that is laid out next.

    There is one buffer on the device: a step's copy into it runs in the stream after all reads of the step before. Its
    addresses never change, so captured graphs may read from it.
    """

    def __init__(self, num_input_bytes: int, num_output_bytes: int, device: torch.device) -> None:
        self._device = device
        self._on_device = torch.empty(num_input_bytes, dtype=torch.uint8, device=device)
        self._buffers = [
            StagingBuffer(pinned(num_input_bytes, device), pinned(num_output_bytes, device), _CompletedEvent())
            for _ in range(_NUM_BUFFERS)
        ]

    @contextmanager
    def next_buffer(self) -> Iterator[StagingBuffer]:
        """The buffer of the next step, which is enqueued in the context. Waits only if the caller has more than one
        step in flight, or tries a step again.

        `done` is recorded at the end, also after an error: copies that were enqueued before it may still read the
        buffer. A step that raised has no handle, so its buffer is the next one again: the other one may be of a step
        whose outputs are not read yet.
        """
        buffer = self._buffers[0]
        buffer.done.synchronize()
        try:
            yield buffer
            self._buffers.append(self._buffers.pop(0))
        finally:
            buffer.done = record(self._device)

    def send(
        self, buffer: StagingBuffer, groups: Sequence[Sequence[NDArray[Any]]], begin: int = 0
    ) -> list[list[Tensor]]:
        """Copies groups of contiguous arrays to the device in one copy. Returns the same groups as tensors.

        The arrays follow each other from the byte `begin` on, each at a multiple of ALIGNMENT.
        """
        memory = buffer.inputs.numpy()
        end = begin
        tensors: list[list[Tensor]] = []
        for group in groups:
            tensors.append([])
            for array in group:
                start = -(-end // ALIGNMENT) * ALIGNMENT
                end = start + array.nbytes
                memory[start:end] = array.reshape(-1).view(np.uint8)
                dtype = _TORCH_DTYPES[array.dtype.name]
                tensors[-1].append(self._on_device[start:end].view(dtype).view(array.shape))
        self._on_device[begin:end].copy_(buffer.inputs[begin:end], non_blocking=True)
        return tensors

    def reserve(self, buffer: StagingBuffer, num_bytes: int) -> Tensor:
        """Memory for so many bytes of outputs on the host, and on the device, for `fetch` of several tensors."""
        if len(buffer.outputs) < num_bytes:
            buffer.outputs = pinned(num_bytes, self._device)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def fetch(self, buffer: StagingBuffer, tensors: Sequence[Tensor], packed: Tensor | None = None) -> Tensor:
        """Starts copying tensors back, as the last operation of the buffer's step. Returns their bytes on the host,
        concatenated.

        Allocates nothing: `packed` is what `reserve` returned for their bytes; one tensor that fits needs none. The
        bytes are valid after the `done` that the end of the buffer's context records, until the buffer is reused.
        """
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        packed = flat[0] if packed is None else torch.cat(flat, out=packed)
        outputs = buffer.outputs[: len(packed)]
        outputs.copy_(packed, non_blocking=True)
        return outputs

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A tensor of its own, for what is too rare or too large for the buffers. Does not wait either.

        torch keeps the pinned memory until the copy is done.
        """
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


_TORCH_DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}
