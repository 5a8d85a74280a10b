"""The compiled forward pass of encoders: all layers of many prompts in one call, without padding."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels.cpu.amx import has_amx
from quire_kernels.cpu.linear import MatrixArgs
from quire_kernels.cpu.norms import NormArgs
from quire_kernels.cpu.thread_pool import ThreadPool, type_of


class DistanceScoresArgs(Structure):
    """`DistanceScores` of attention.h."""

    _fields_ = (("of_heads", c_void_p), ("stride", c_int64), ("own_place", c_int64))


class EncoderLayerArgs(Structure):
    """`EncoderLayer` of encoder.h."""

    _fields_ = (
        ("qkv", MatrixArgs),
        ("output", MatrixArgs),
        ("attention_norm", NormArgs),
        ("gate_up", MatrixArgs),
        ("down", MatrixArgs),
        ("mlp_norm", NormArgs),
    )


class EncoderModelArgs(Structure):
    """`EncoderModel` of encoder.h."""

    _fields_ = (
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("num_layers", c_int64),
        ("num_heads", c_int64),
        ("activation", c_int64),
        ("is_gated", c_int64),
        ("words", c_void_p),
        ("positions", c_void_p),
        ("types", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("norm", NormArgs),
        ("distances", DistanceScoresArgs),
        ("layers", POINTER(EncoderLayerArgs)),
    )


class EncoderStepArgs(Structure):
    """`EncoderStep` of encoder.h."""

    _fields_ = (
        ("num_prompts", c_int64),
        ("token_ids", c_void_p),
        ("starts", c_void_p),
        ("num_first", c_void_p),
        ("num_rows", c_int64),
        ("rows", c_void_p),
        ("output", c_void_p),
    )


PADDING = 16
"""Numbers behind the distances of a head: a vector of them is read."""


class Encoder:
    """An encoder whose weights are at the addresses in its arguments, which the caller keeps. For one thread.

    A prompt's bits do not depend on the other prompts of its call.
    """

    def __init__(
        self, thread_pool: ThreadPool, dtype: torch.dtype, arguments: EncoderModelArgs, *, use_amx: bool
    ) -> None:
        """`dtype`: of weights and word embeddings. With `use_amx`, weights are packed by `pack_for_amx`, else by
        `pack_matrix`. Raises ValueError for another dtype, or `use_amx` on a processor without AMX or with scores by
        distances.
        """
        require(not use_amx or has_amx(thread_pool), "use_amx", "be false on a processor without AMX")
        require(not use_amx or not arguments.distances.of_heads, "use_amx", "be false with scores by distances")
        self._thread_pool = thread_pool  # whose threads the library's object uses
        self._hidden_size: int = arguments.hidden_size
        self._handle: int | None = thread_pool.library.quire_encoder_new(
            thread_pool.handle, type_of(dtype), int(use_amx), byref(arguments)
        )

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_first: Sequence[int] | None, rows: NDArray[np.int64]
    ) -> Tensor:
        """The last hidden states of tokens, float32 [num_rows, hidden_size]: of those at `rows`, ascending, of all
        prompts' tokens one after another. After its attention, the last layer computes only these.

        `num_first` is how many tokens of each prompt are of the first type; None: all. Raises ValueError for an empty
        prompt. Token ids, lengths and rows are not checked.
        """
        lengths = [len(prompt) for prompt in prompts]
        require(all(lengths), "prompts", "have no empty prompt")
        require(num_first is None or len(num_first) == len(prompts), "num_first", "have a number for each prompt")
        token_ids = np.fromiter((token_id for prompt in prompts for token_id in prompt), np.int64, sum(lengths))
        starts = np.zeros(len(prompts) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        first = None if num_first is None else np.array(num_first, np.int64)
        output = torch.empty(len(rows), self._hidden_size)
        step = EncoderStepArgs(
            len(prompts),
            token_ids.ctypes.data,
            starts.ctypes.data,
            None if first is None else first.ctypes.data,
            len(rows),
            rows.ctypes.data,
            output.data_ptr(),
        )
        self._thread_pool.library.quire_encoder_run(self._handle, byref(step))
        return output

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._thread_pool.library.quire_encoder_delete(self._handle)
            self._handle = None
