"""Log-probabilities of drawn tokens, as they are told."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker_svc.step import TokenLogprobs


def to_token_logprobs(
    values: NDArray[np.float32], ids: NDArray[np.integer[Any]], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Rows of log-probabilities [rows, 1 + count], the drawn token's first, and of the likeliest tokens [rows, count].

    `counts` say how many of the likeliest each row asked for.
    """
    return [
        TokenLogprobs(row[0], list(zip(row_ids[:count], row[1 : 1 + count], strict=True)))
        for row, row_ids, count in zip(values.tolist(), ids.tolist(), counts, strict=True)
    ]
