"""Samples from rows of logits, and log-probabilities."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels._checks import require
from quire_kernels.cpu.thread_pool import ThreadPool

# `Draw` of sample.h, a row each.
SAMPLING_PARAMS_DTYPE = np.dtype(
    [
        ("number", np.float64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int64),
    ]
)


def argmax(thread_pool: ThreadPool, logits: Tensor, *, suppressed: bool = False) -> NDArray[np.int64]:
    """The argmax of each row of float32 logits [rows, vocab], the first of equals.

    -1 where a logit is not finite. With `suppressed` logits may be minus infinity, but not all of a row.
    """
    _check_logits(logits)
    tokens = np.empty(len(logits), np.int64)
    thread_pool.library.quire_argmax(
        thread_pool.handle,
        logits.data_ptr(),
        len(logits),
        logits.stride(0),
        logits.shape[1],
        suppressed,
        tokens.ctypes.data,
    )
    return tokens


def mask_logits(
    thread_pool: ThreadPool, logits: Tensor, rows: NDArray[np.int64], bits: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Sets logits of these rows of float32 logits [rows, vocab] to minus infinity, in place, where a bit is not set.

    `bits` int32 [len(rows), words]: bit t % 32 of word t // 32 is token t's. Returns the argmax of each, the first of
    equals; -1 where no token is left or where one is NaN or infinity.
    """
    _check_logits(logits)
    _check_rows(rows, logits)
    is_bits = bits.dtype == np.int32 and bits.ndim == 2 and len(bits) == len(rows) and bits.flags.c_contiguous
    require(is_bits and 32 * bits.shape[1] >= logits.shape[1], "bits", "be int32 [rows, words], a bit for each token")
    tokens = np.empty(len(rows), np.int64)
    thread_pool.library.quire_mask_logits(
        thread_pool.handle,
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        rows.ctypes.data,
        bits.ctypes.data,
        bits.shape[1],
        len(rows),
        tokens.ctypes.data,
    )
    return tokens


def sample(
    thread_pool: ThreadPool, logits: Tensor, rows: NDArray[np.int64], params: NDArray[np.void]
) -> NDArray[np.int64]:
    """Samples a token for each of `rows` of float32 logits [rows, vocab], with the parameters of `draws`
    (SAMPLING_PARAMS_DTYPE) at the same index.

    Weights are those of a softmax at the temperature, which is above 0. min_p and top_k (0: all) each
    keep tokens, and top_p some of those; of equally likely tokens at a limit, all are kept. The uniform number selects
    by the cumulative weight in the order of the vocabulary. Logits of minus infinity are never sampled; the token is -1
    where all are, or where one is NaN.
    """
    _check_logits(logits)
    is_params = params.dtype == SAMPLING_PARAMS_DTYPE and len(rows) == len(params) and params.flags.c_contiguous
    require(is_params, "params", "be of SAMPLING_PARAMS_DTYPE, as many as rows, and contiguous")
    _check_rows(rows, logits)
    tokens = np.empty(len(rows), np.int64)
    thread_pool.library.quire_sample(
        thread_pool.handle,
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        rows.ctypes.data,
        params.ctypes.data,
        len(rows),
        tokens.ctypes.data,
    )
    return tokens


def top_logprobs(
    thread_pool: ThreadPool, logits: Tensor, tokens: NDArray[np.int64], count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Log-probabilities of one token of each row of float32 logits [rows, vocab], and of the row's top `count`.

    Returns float32 [rows, 1 + count], the token's first, and int64 [rows, count], the ids of the top tokens in
    falling order, of equals the first first. A row's bits depend on nothing but the row. The result of a row with NaN
    is undefined.
    """
    _check_logits(logits)
    is_tokens = tokens.dtype == np.int64 and tokens.shape == (len(logits),) and tokens.flags.c_contiguous
    require(is_tokens, "tokens", "be int64 [rows], contiguous")
    is_within = not len(tokens) or (tokens.min() >= 0 and tokens.max() < logits.shape[1])
    require(bool(is_within), "tokens", "be of the vocabulary")
    require(0 <= count <= logits.shape[1], "count", "be at most the vocabulary's size")
    logprobs, ids = np.empty((len(logits), 1 + count), np.float32), np.empty((len(logits), count), np.int64)
    thread_pool.library.quire_top_logprobs(
        thread_pool.handle,
        logits.data_ptr(),
        len(logits),
        logits.stride(0),
        logits.shape[1],
        tokens.ctypes.data,
        count,
        logprobs.ctypes.data,
        ids.ctypes.data,
    )
    return logprobs, ids


def _check_rows(rows: NDArray[np.int64], logits: Tensor) -> None:
    is_list = rows.dtype == np.int64 and rows.ndim == 1 and rows.flags.c_contiguous
    require(is_list, "rows", "be int64 [rows], contiguous")
    is_within = not len(rows) or (rows.min() >= 0 and rows.max() < len(logits))
    require(bool(is_within), "rows", "be rows of logits")


def _check_logits(logits: Tensor) -> None:
    is_rows = logits.ndim == 2 and logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.shape[1] > 0
    require(is_rows, "logits", "be float32 [rows, vocab], contiguous in their rows")
