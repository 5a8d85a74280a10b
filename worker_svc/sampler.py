"""Samples next tokens from logits.

A sampled token is a function of the row's logits, its parameters, seed, sequence index and position. Nothing else of
the batch matters, so a sequence that is resumed or moved samples what it would have sampled.
"""

import math
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.penalties import Adjustments, adjust_logits, filter_logits, filtered_rows
from worker_svc.philox import uniforms
from worker_svc.step import SamplingParams, TokenLogprobs
from worker_svc.token_masks import TokenMasks

if TYPE_CHECKING:  # it imports llguidance, which sequences without grammars do not need
    from worker_svc.grammar_matcher import GrammarMatcher

# Below this a temperature is greedy: in float32 the weight of every other token is 0.
MIN_TEMPERATURE = 1e-5
# Sampling finds the group of the token first, then the token. Vocabularies are mostly multiples of this.
_GROUP = 64
_CPU_ROWS = 4
# Weights are counted by exponent and five bits of the mantissa: the highest bucket holds the weight 1 alone.
_BUCKET_SHIFT = 18
_NUM_BUCKETS = (0x3F800000 >> _BUCKET_SHIFT) + 1


class SamplingState:
    """How one sequence samples, updated as it grows."""

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        tokens: NDArray[np.int32],
        prompt_length: int,
        matcher: "GrammarMatcher | None" = None,
    ) -> None:
        """`matcher` has the tokens after the prompt already; it belongs to this state from now on."""
        self.params = params
        self.index = index
        self.seed = params.seed % 2**64
        self.position = len(tokens)
        self.adjustments = Adjustments(params, tokens, prompt_length)
        self.matcher = matcher

    def add(self, token: int) -> None:
        """Adds a sampled token: the next one is for the position after it."""
        self.position += 1
        self.adjustments.add(token)
        if self.matcher is not None:
            self.matcher.add(token)

    def ahead(self, draft: Sequence[int]) -> "list[SamplingState]":
        """The state now, and the state after each of these tokens if they were sampled."""
        states = [self]
        for token in draft:
            state = copy(states[-1])
            state.adjustments = state.adjustments.copy()
            state.matcher = None if state.matcher is None else state.matcher.copy()
            state.add(token)
            states.append(state)
        return states

    @property
    def is_greedy(self) -> bool:
        """Whether the top token is taken."""
        return self.params.temperature < MIN_TEMPERATURE

    @property
    def needs_logits(self) -> bool:
        """Whether more is needed of the model's next logits than which token has the largest."""
        return (
            not self.is_greedy
            or self.params.logprobs is not None
            or self.matcher is not None
            or self.adjustments.changes_logits
        )


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled token of each row; None if its logits had NaN or infinity, or all tokens were suppressed.

    `prompt_logprobs` are of the pieces of prompts that were computed before, a list for each. Of sequences that were
    `left_out` because memory ran out, by id, nothing is computed: they have neither tokens nor log-probabilities.
    """

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    left_out: Collection[int] = ()


def num_accepted(tokens: Sequence[int | None], draft: Sequence[int]) -> int:
    """How many of the sampled tokens count, of those after a sequence's last known token and after each draft token.

    A draft token is accepted if it was sampled; then the token after it counts too. The first that differs is
    rejected, with all that was computed after it. A row without a token (None) counts and ends the sequence's tokens.
    """
    for place, (token, drafted) in enumerate(zip(tokens, draft, strict=False)):
        if token != drafted:
            return place + 1
    return len(tokens)


def start_masks(states: Sequence[SamplingState]) -> "Future[TokenMasks] | None":
    """Begins to make the masks of the rows with a grammar, on another thread. None if there is no such row."""
    matchers = [(row, state.matcher) for row, state in enumerate(states) if state.matcher is not None]
    return matchers[0][1].compiler.start_masks(matchers) if matchers else None


def sample_tokens(logits: Tensor, states: Sequence[SamplingState], masks: TokenMasks | None = None) -> SamplerOutput:
    """Samples one token for each row of logits [rows, vocab], of any float dtype; the logits may be changed.

    The order is vLLM's: log-probabilities are of the model's own logits; then bias, penalties, suppression and the
    masks of grammars, which also affect greedy sampling; then temperature; then min-p and top-k, each on its own, and
    top-p over what they keep. Of tokens that are equal at a limit, all are kept, so that no order among them matters.
    """
    logits = logits.float()
    # NaN is the largest and the smallest of its row; these two are many times cheaper than a test of each. A sum would
    # overflow where a model has the least number as the logit of several tokens that it never samples.
    valid = (logits.amax(-1).isfinite() & logits.amin(-1).isfinite()).tolist()
    if not all(valid):
        logits[[row for row, is_valid in enumerate(valid) if not is_valid]] = 0.0
    reported = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    masked = {} if masks is None else {row: place for place, row in enumerate(masks.rows.tolist())}
    adjusted = [row for row, state in enumerate(states) if state.adjustments.changes_logits or row in masked]
    random = [row for row, state in enumerate(states) if not state.is_greedy]
    raw = logits[reported] if reported else None
    if adjusted:
        part = logits[adjusted]
        adjustments = [states[row].adjustments for row in adjusted]
        adjust_logits(part, adjustments)
        if masks is not None:
            allowed = masks.as_bools(part.shape[1])
            places = [place for place, row in enumerate(adjusted) if row in masked]
            is_allowed = torch.from_numpy(allowed[[masked[adjusted[place]] for place in places]]).to(part.device)
            part[places] = part[places].masked_fill_(~is_allowed, float("-inf"))
        filter_logits(part, filtered_rows(adjustments))
        # If every token is suppressed there is none to sample.
        is_possible = part.amax(-1).isfinite()
        part[~is_possible] = 0.0
        logits[adjusted] = part
        for row, possible in zip(adjusted, is_possible.tolist(), strict=True):
            valid[row] = valid[row] and possible
    if not random:
        tokens = _argmax(logits)
    elif len(random) == len(states):
        tokens = _sample(logits, states)
    else:
        tokens = _argmax(logits)
        tokens[random] = _sample(logits[random], [states[row] for row in random])
    sampled = [token if is_valid else None for token, is_valid in zip(tokens.tolist(), valid, strict=True)]
    return SamplerOutput(sampled, gather_logprobs(raw, tokens, states))


def _argmax(logits: Tensor) -> Tensor:
    """The first of the top tokens of each row: int64 [rows]."""
    # torch finds a maximum many times faster than its index, so the index is searched in one group only.
    width = math.gcd(logits.shape[1], _GROUP)
    grouped = logits.view(len(logits), -1, width)
    group = grouped.amax(-1).argmax(-1)
    return group * width + grouped[torch.arange(len(logits), device=logits.device), group].argmax(-1)


def uniform_numbers(states: Sequence[SamplingState]) -> NDArray[np.float64]:
    """The uniform number in [0, 1) of each row, by its seed, index and position."""
    return uniforms(
        np.array([state.seed for state in states], np.uint64),
        np.array([state.index for state in states], np.uint32),
        np.array([state.position for state in states], np.uint32),
    )


def _sample(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """One token for each row by its seed: int64 [rows]."""
    numbers = uniform_numbers(states)
    params = [state.params for state in states]
    # A few rows at a time, whose intermediate values stay in the cache
    sampled = []
    for first in range(0, len(params), _CPU_ROWS):
        part = slice(first, first + _CPU_ROWS)
        weights = _weights(logits[part], params[part])
        sampled.append(_inverse_cdf(weights, torch.from_numpy(numbers[part]).to(logits.device)))
    return torch.cat(sampled)


def _weights(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Unnormalised probabilities [rows, vocab]: 1 for the top token, 0 for tokens that are not kept."""
    temperatures = _column([p.temperature for p in params], logits)
    # The largest logit is subtracted first, so that no temperature makes the quotient overflow.
    weights = logits.sub(logits.amax(-1, keepdim=True)).div_(temperatures).exp_()
    thresholds = _column([p.min_p for p in params], weights)
    by_top_k = [row for row, p in enumerate(params) if 0 < p.top_k < weights.shape[1]]
    if by_top_k:
        part = weights[by_top_k]
        ranks = _column([params[row].top_k for row in by_top_k], weights)
        thresholds[by_top_k] = torch.maximum(
            thresholds[by_top_k], _threshold(part, part.sign().double(), ranks.double())
        )
    if by_top_k or any(p.min_p > 0.0 for p in params):
        weights = _mask_below(weights, thresholds)
    by_top_p = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if by_top_p:
        part = weights[by_top_p]
        probability_masses = part.double()
        shares = torch.tensor([[params[row].top_p] for row in by_top_p], dtype=torch.float64, device=weights.device)
        weights[by_top_p] = _mask_below(
            part, _threshold(part, probability_masses, shares * probability_masses.sum(-1, keepdim=True))
        )
    return weights


def _mask_below(weights: Tensor, thresholds: Tensor) -> Tensor:
    """The weights [rows, vocab], with those below the row's threshold [rows, 1] set to 0."""
    # A mask of floats: torch is several times slower with booleans.
    return weights.clone().ge_(thresholds).mul_(weights)


def _threshold(weights: Tensor, measures: Tensor, targets: Tensor) -> Tensor:
    """The smallest weight [rows, 1] among the fewest, largest weights whose measures together reach each row's target.

    `weights` are float32 [rows, vocab] from 0 to 1, `measures` float64 [rows, vocab], 0 for a weight of 0, `targets`
    float64 [rows, 1]; a target out of reach stands for all. Sorting a vocabulary would take longer than a layer of the
    model: tokens are counted into buckets by the leading bits of their weights, whose order as integers is that of the
    weights, and only the bucket that holds the target is sorted.
    """
    buckets = weights.view(torch.int32).bitwise_right_shift(_BUCKET_SHIFT).long()
    sums = measures.new_zeros(len(weights), _NUM_BUCKETS).scatter_add_(1, buckets, measures)
    # From the heaviest bucket down
    reached = sums.flip(-1).cumsum(-1)
    targets = torch.minimum(targets, reached[:, -1:])
    place = (reached < targets).sum(-1, keepdim=True)
    before = torch.where(place > 0, reached.gather(-1, (place - 1).clamp_(min=0)), 0.0)

    rows, tokens = (buckets == _NUM_BUCKETS - 1 - place).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=len(weights))
    columns = torch.arange(len(rows), device=weights.device) - (counts.cumsum(0) - counts)[rows]
    # [rows, members of the largest bucket], padded with weights of 0
    bucket = weights.new_zeros(len(weights), int(counts.max()))
    bucket[rows, columns] = weights[rows, tokens]
    measured = measures.new_zeros(bucket.shape)
    measured[rows, columns] = measures[rows, tokens]
    bucket, order = bucket.sort(-1, descending=True)
    short = (before + measured.gather(-1, order).cumsum(-1) < targets).sum(-1, keepdim=True)
    return bucket.gather(-1, torch.minimum(short, counts[:, None] - 1))


def _inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """The first token of each row [rows, vocab], in vocabulary order, at which the sum of weights exceeds its share.

    `numbers` are float64 [rows] in [0, 1). A token of weight 0 is never returned.
    """
    if weights.shape[1] % _GROUP:
        weights = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _GROUP))
    grouped = weights.view(len(weights), -1, _GROUP)
    ends = grouped.sum(-1).cumsum(-1, dtype=torch.float64)
    target = numbers[:, None] * ends[:, -1:]
    # Rounding may put the target at the very end, and the ends of groups a little off the sum of their tokens.
    group = torch.minimum((ends <= target).sum(-1, keepdim=True), (ends < ends[:, -1:]).sum(-1, keepdim=True))
    before = torch.where(group > 0, ends.gather(-1, (group - 1).clamp_(min=0)), 0.0)
    members = grouped.gather(1, group[:, :, None].expand(-1, 1, _GROUP)).squeeze(1)
    member = (before + members.cumsum(-1, dtype=torch.float64) <= target).sum(-1)
    heavy = torch.arange(_GROUP, device=weights.device) * (members > 0)
    return group.squeeze(1) * _GROUP + torch.minimum(member, heavy.amax(-1))


def gather_logprobs(raw: Tensor | None, tokens: Tensor, states: Sequence[SamplingState]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the sampled tokens int64 [rows] and of each row's top tokens, for the rows that request
    them.

    `raw` are the model's own logits of these rows [requesting rows, vocab]; None if there are none.
    """
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    if raw is None:
        return logprobs
    wanted = [(row, state.params.logprobs) for row, state in enumerate(states) if state.params.logprobs is not None]
    norms = raw.logsumexp(-1, keepdim=True)
    sampled = (raw.gather(-1, tokens[[row for row, _ in wanted], None]) - norms).squeeze(1).tolist()
    values, ids = raw.topk(min(max(count for _, count in wanted), raw.shape[1]))
    for place, ((row, count), logprob, ranked, ranked_ids) in enumerate(
        zip(wanted, sampled, (values - norms).tolist(), ids.tolist(), strict=True)
    ):
        requested = list(states[row].params.logprob_token_ids)
        logprobs[row] = TokenLogprobs(
            logprob,
            list(zip(ranked_ids[:count], ranked[:count], strict=True)),
            (raw[place, requested] - norms[place]).tolist() if requested else (),
        )
    return logprobs


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
