"""Log-probabilities of tokens, computed on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire_kernels.log_norms import log_norms
from worker_svc.logprobs import to_token_logprobs
from worker_svc.step import SamplingParams, TokenLogprobs

_LOW = 2**32 - 1


class ReportedRows:
    """Rows of logits that report log-probabilities: of a token, of top tokens, and of requested tokens."""

    def __init__(
        self, rows: Sequence[int], counts: Sequence[int], requested: Sequence[Sequence[int]], vocab_size: int
    ) -> None:
        """`counts` are the numbers of top tokens, `requested` the requested tokens of each of these rows."""
        self.rows = np.array(rows, np.int64)
        self._counts = [min(count, vocab_size) for count in counts]
        self._requested = requested
        self._num_top = max(self._counts, default=0)
        self._num_requested = max(map(len, requested), default=0)

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int) -> "ReportedRows":
        """Of the rows that sample with these parameters, those that report."""
        asked = [(row, one.logprobs, one.logprob_token_ids) for row, one in enumerate(params)]
        rows = [(row, count, requested) for row, count, requested in asked if count is not None]
        return cls([row for row, *_ in rows], [count for _, count, _ in rows], [ids for *_, ids in rows], vocab_size)

    @property
    def num_bytes(self) -> int:
        """How many bytes of values and ids there are."""
        return 4 * len(self.rows) * (1 + 2 * self._num_top + self._num_requested)

    def prepare(self, logits: Tensor, upload: Callable[[NDArray[Any]], Tensor]) -> "RowLogprobs":
        """From the model's own logits of these rows: values and ids for `unpack`, but for those of the rows' tokens."""
        requested = None
        if self._num_requested:
            padded = np.zeros((len(self.rows), self._num_requested), np.int64)
            for row, token_ids in zip(padded, self._requested, strict=True):
                row[: len(token_ids)] = token_ids
            requested = upload(padded)
        return prepare_logprobs(logits, self._num_top, requested)

    def unpack(self, memory: NDArray[np.uint8]) -> list[TokenLogprobs]:
        """From the `num_bytes` bytes of what was computed."""
        num_values = 1 + self._num_top + self._num_requested
        end = 4 * len(self.rows) * num_values
        values = memory[:end].view(np.float32).reshape(len(self.rows), num_values)
        ids = memory[end:].view(np.int32).reshape(len(self.rows), self._num_top)
        return to_token_logprobs(values, ids, self._counts, list(map(len, self._requested)))


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of rows, all but those of the rows' own tokens, which may not be sampled yet."""

    values: Tensor
    """float32 [rows, 1 + count + others]: of the row's token, of the top tokens, of requested tokens."""
    top_tokens: Tensor
    """int32 [rows, count]"""
    logits: Tensor
    norms: Tensor
    tokens: Tensor
    """int64 [rows, 1]; with `of_tokens`, memory for `complete`, which allocates none."""
    of_tokens: Tensor

    def complete(self, tokens: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        """Values and top tokens, with the values of the rows' tokens; with `rows`, each row's place in `tokens`.

        Those of a token of -1 mean nothing.
        """
        if rows is None:
            self.tokens.copy_(tokens[:, None])
        else:
            torch.index_select(tokens, 0, rows, out=self.tokens.view(-1))
        torch.gather(self.logits, 1, self.tokens.clamp_(min=0), out=self.of_tokens)
        torch.sub(self.of_tokens, self.norms, out=self.values[:, :1])
        return [self.values, self.top_tokens]


def prepare_logprobs(logits: Tensor, count: int, requested: Tensor | None = None) -> RowLogprobs:
    """From the model's own logits [rows, vocab_size]: of each row's top `count` tokens, and of its `requested` tokens
    int64 [rows, others].

    Of equal logits the lower token id comes first, so that neither `count` nor the other rows matter.
    """
    norms, num_rows = log_norms(logits)[:, None], len(logits)
    tokens = torch.empty((num_rows, 1), dtype=torch.int64, device=logits.device)
    ids = _LOW - (_keys(logits).topk(count).values & _LOW) if count else tokens[:, :0]
    chosen = ids if requested is None else torch.cat([ids, requested], 1)
    values = logits.new_empty(num_rows, 1 + chosen.shape[1])
    torch.sub(logits.gather(-1, chosen), norms, out=values[:, 1:])
    return RowLogprobs(values, ids.int(), logits, norms, tokens, logits.new_empty(num_rows, 1))


def _keys(logits: Tensor) -> Tensor:
    """Integers [rows, vocab_size] in the order of the logits; of equal logits, lower token ids have larger keys."""
    bits = logits.view(torch.int32)
    # The order of negative floats is the reverse of that of their bits.
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    places = torch.arange(logits.shape[1], device=logits.device)
    return ordered.long() << 32 | _LOW - places
