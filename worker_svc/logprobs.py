"""Log-probabilities of sampled tokens, as they are reported."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_svc.step import TokenLogprobs


def to_token_logprobs(
    values: NDArray[np.float32], ids: NDArray[np.integer[Any]], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """From rows of log-probabilities [rows, 1 + count], the sampled token's first, and the top tokens [rows, count].

    `counts` are the numbers of top tokens that the rows request.
    """
    return [
        TokenLogprobs(row[0], list(zip(row_ids[:count], row[1 : 1 + count], strict=True)))
        for row, row_ids, count in zip(values.tolist(), ids.tolist(), counts, strict=True)
    ]
