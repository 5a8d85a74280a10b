"""Log-probabilities of sampled tokens, as they are reported."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_svc.step import TokenLogprobs


def to_token_logprobs(
    values: NDArray[np.float32],
    ids: NDArray[np.integer[Any]],
    counts: Sequence[int],
    num_requested: Sequence[int] = (),
) -> list[TokenLogprobs]:
    """From rows of log-probabilities: the token's, then those of the top tokens, whose ids are [rows, count], then
    those of requested tokens.

    `counts` are the numbers of top tokens that the rows request, `num_requested` of requested tokens; empty: none.
    """
    first = 1 + ids.shape[1]
    return [
        TokenLogprobs(row[0], list(zip(row_ids[:count], row[1 : 1 + count], strict=True)), row[first : first + others])
        for row, row_ids, count, others in zip(
            values.tolist(), ids.tolist(), counts, num_requested or [0] * len(counts), strict=True
        )
    ]
