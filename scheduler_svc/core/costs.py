"""What steps and copies cost on one replica, in seconds: a prior first, then learned from measurements."""

import math
from collections.abc import Sequence as Seq

from scheduler_svc.core.step import Direction, StepPlan

_STEP_MEMORY = 100  # steps over which an estimate forgets
_FIRST_STEPS = 100  # steps after which an estimate depends on measurements more than on the prior
_SWAP_MEMORY = 16  # transfers over which an estimate forgets; they are rarer
# Typical amounts of each term, as which the prior counts: steps, prefill tokens, decodes, pairs of a prefill token and
# one before it.
_TYPICAL_STEP = (1.0, 64.0, 4.0, 16_384.0)
_TYPICAL_SWAP = (1.0, 16.0)  # transfers, blocks
_DEFAULT_PREFILL_RATE = 1000.0  # tokens per second, if the worker reports none
_OUTLIER = 3.0  # times the usual error; observations are clipped to it
_LEAST_SECONDS = 1e-6  # the shortest estimate
_ROUGH = 0.5  # relative error that is taken as usual at first
_CHANGE = 8  # outliers in a row that count as a change: most of what was learned is forgotten
_LEAST_ERROR = 0.02  # the smallest relative error that is taken as usual


class LinearFit:
    """Coefficients, none negative, of a sum of terms, by recursive least squares that forgets, in information form.

    See Ljung, "System Identification", section 11.2. An observation makes it forget only its own terms: steps without
    prefill leave the estimate of prefill unchanged. An observation with more than _OUTLIER times the usual relative
    error has Huber's weight, so that a compilation or a stopped process does not spoil the estimate. _CHANGE of them in
    a row count as a change.
    """

    def __init__(self, prior: Seq[float], typical: Seq[float], memory: int) -> None:
        """The prior coefficients count like one observation of each term alone, in its `typical` amount."""
        self.coefficients = list(prior)
        self._information = [[x * x if i == j else 0.0 for j in range(len(prior))] for i, x in enumerate(typical)]
        # The least information about each term: steps that are all alike inform about one direction and forget others.
        self._least = [x * x / memory for x in typical]
        self._forget = 1 - 1 / memory
        self._adapt = 4 / memory
        self._usual_error = _ROUGH  # relative to the prediction
        self._num_outliers = 0  # in a row

    def predict(self, terms: Seq[float]) -> float:
        """The predicted value for these amounts."""
        return sum(c * x for c, x in zip(self.coefficients, terms, strict=True))

    def observe(self, terms: Seq[float], value: float) -> float:
        """Learns from an observation. Returns it, clipped if it was an outlier."""
        predicted = self.predict(terms)
        scale = max(_LEAST_SECONDS, predicted)
        most = _OUTLIER * max(self._usual_error, _LEAST_ERROR) * scale
        error = max(-most, min(most, value - predicted))
        self._usual_error += self._adapt * (abs(error) / scale - self._usual_error)
        weight = error / (value - predicted) if error else 1.0  # Huber's
        self._num_outliers = self._num_outliers + 1 if weight < 1 else 0
        forget = self._forget
        if self._num_outliers == _CHANGE:
            self._num_outliers, self._usual_error = 0, max(self._usual_error, _ROUGH)
            forget = 0.1
        decay = [forget**0.5 if x else 1.0 for x in terms]
        self._information = [
            [
                known * decay[i] * decay[j] + weight * terms[i] * terms[j] + (self._least[i] if i == j else 0.0)
                for j, known in enumerate(row)
            ]
            for i, row in enumerate(self._information)
        ]
        self._learn(terms, error)
        return predicted + error

    def _learn(self, terms: Seq[float], error: float) -> None:
        """Distributes an error over the coefficients. Those that would become negative stay 0."""
        free = list(range(len(terms)))
        while free:
            matrix = [[self._information[i][j] for j in free] for i in free]
            steps = [gain * error for gain in _solve(matrix, [terms[i] for i in free])]
            held = [i for i, step in zip(free, steps, strict=True) if self.coefficients[i] == 0.0 and step < 0.0]
            if not held:
                for i, step in zip(free, steps, strict=True):
                    self.coefficients[i] = max(0.0, self.coefficients[i] + step)
                return
            free = [i for i in free if i not in held]


def count_pairs(num_before: int, num_tokens: int) -> float:
    """Pairs of a token and one before it, or itself, for `num_tokens` tokens after `num_before` of their sequence."""
    return num_tokens * (num_before + num_tokens / 2)


class CostModel:
    """Costs on one replica.

    A step costs a constant, plus a time for each prefill token, for each pair of one and a token before it, which
    attention computes, and for each decode. A transfer costs a constant and a time for each block, by direction.
    `swap_bytes_per_second` and `prefill_tokens_per_second` are what the worker measured at start-up; 0 if it reports
    none.
    """

    def __init__(self, block_bytes: int, swap_bytes_per_second: float, prefill_tokens_per_second: float) -> None:
        per_token = 1 / (prefill_tokens_per_second or _DEFAULT_PREFILL_RATE)
        self._least_per_token = per_token / 100
        self._step = LinearFit((0.0, per_token, per_token, 0.0), _TYPICAL_STEP, _STEP_MEMORY)
        per_block = block_bytes / swap_bytes_per_second if swap_bytes_per_second else float("inf")
        self._block_prior = per_block
        self._swap_fits: dict[Direction, LinearFit] = {}
        self._num_steps = 0
        self._num_tokens = 0.0  # of the last steps, exponentially weighted
        self._seconds = 0.0  # that they took, weighted likewise
        # Of the last steps with decodes, weighted likewise: the time of their prompts, and the rest of it.
        self._prompt_seconds = self._decode_seconds = 0.0

    def observe_plan(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long on the device."""
        num_prefill_tokens, num_decodes, num_pairs = _amounts(plan)
        self.observe_step(num_prefill_tokens, num_decodes, seconds, num_pairs)

    def observe_step(self, num_prefill_tokens: int, num_decodes: int, seconds: float, num_pairs: float = 0.0) -> None:
        """A step with these amounts took so long on the device. `num_pairs` comes from `count_pairs`."""
        if not num_prefill_tokens and not num_decodes:
            return
        self._num_steps += 1
        usual = self._step.observe((1.0, num_prefill_tokens, num_decodes, num_pairs), seconds)
        fade = 1 - 1 / _STEP_MEMORY
        self._num_tokens = fade * self._num_tokens + num_prefill_tokens + num_decodes
        self._seconds = fade * self._seconds + usual
        if num_decodes:
            prompts = min(usual, num_prefill_tokens * self._per_token + num_pairs * self._per_pair)
            self._prompt_seconds = fade * self._prompt_seconds + prompts
            self._decode_seconds = fade * self._decode_seconds + usual - prompts

    def observe_swap(self, num_blocks: int, direction: Direction, seconds: float) -> None:
        """A swap of `num_blocks` blocks took `seconds`."""
        if not num_blocks:
            return
        fit = self._swap_fits.get(direction)
        if fit is None:
            per_block = self._block_prior if self._block_prior != float("inf") else seconds / num_blocks
            fit = self._swap_fits[direction] = LinearFit((0.0, per_block), _TYPICAL_SWAP, _SWAP_MEMORY)
        fit.observe((1.0, num_blocks), seconds)

    def swap_seconds(self, num_blocks_out: int, num_blocks_in: int) -> float:
        """How long it takes to copy blocks to the host and others back; infinite if nothing is known of copies."""
        return self._swap_seconds(Direction.OUT, num_blocks_out) + self._swap_seconds(Direction.IN, num_blocks_in)

    def recompute_seconds(self, num_tokens: int, num_before: int = 0) -> float:
        """How much longer steps take for `num_tokens` prefill tokens, after `num_before` tokens of their sequence."""
        return num_tokens * self._per_token + count_pairs(num_before, num_tokens) * self._per_pair

    def prefill_within(self, seconds: float, num_before: int) -> int:
        """How many prefill tokens, after `num_before` of their sequence, can be computed in that time."""
        if seconds <= 0:
            return 0
        each = self._per_token + self._per_pair * num_before
        # The root of pair / 2 × n² + each × n = seconds, in the form that also holds if a pair costs nothing.
        return int(2 * seconds / (each + math.sqrt(each * each + 2 * self._per_pair * seconds)))

    def step_seconds(self, num_prefill_tokens: int, num_decodes: int) -> float:
        """How long a step takes whose prefill tokens begin prompts; always above 0."""
        return self._predict(num_prefill_tokens, num_decodes, count_pairs(0, num_prefill_tokens))

    def plan_seconds(self, plan: StepPlan) -> float:
        """How long a step takes; 0 where it computes nothing."""
        num_prefill_tokens, num_decodes, num_pairs = _amounts(plan)
        if not num_prefill_tokens and not num_decodes:
            return 0.0
        return self._predict(num_prefill_tokens, num_decodes, num_pairs)

    def _predict(self, num_prefill_tokens: int, num_decodes: int, num_pairs: float) -> float:
        return max(_LEAST_SECONDS, self._step.predict((1.0, num_prefill_tokens, num_decodes, num_pairs)))

    @property
    def _per_token(self) -> float:
        return max(self._least_per_token, self._step.coefficients[1])

    @property
    def _per_pair(self) -> float:
        return self._step.coefficients[3]

    @property
    def has_learned(self) -> bool:
        """Whether estimates of steps depend on measurements more than on the prior."""
        return self._num_steps >= _FIRST_STEPS

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the last steps, prefill and decode together; 0 before the first."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    @property
    def prompt_factor(self) -> float:
        """How many times as long as the decodes prompts took in the last steps with decodes; 0 before the first one."""
        if self._decode_seconds > 0.0:
            return self._prompt_seconds / self._decode_seconds
        return math.inf if self._prompt_seconds else 0.0

    def _swap_seconds(self, direction: Direction, num_blocks: int) -> float:
        if not num_blocks:
            return 0.0
        fit = self._swap_fits.get(direction)
        return fit.predict((1.0, num_blocks)) if fit is not None else num_blocks * self._block_prior


def _amounts(plan: StepPlan) -> tuple[int, int, float]:
    """Prefill tokens, decodes, and pairs of a prefill token and one before it."""
    num_prefill_tokens = num_decodes = 0
    num_pairs = 0.0
    for _, start, num_tokens, _, _, samples, _ in plan.scheduled:
        if num_tokens == 1 and samples:
            num_decodes += 1
        else:
            num_prefill_tokens += num_tokens
            num_pairs += count_pairs(start, num_tokens)
    return num_prefill_tokens, num_decodes, num_pairs


def _solve(matrix: Seq[Seq[float]], right: Seq[float]) -> list[float]:
    """Solves matrix × x = right; `matrix` is symmetric and positive definite. Gaussian elimination, without pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            if factor:
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
