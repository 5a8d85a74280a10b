"""How long outputs usually are, by kind of request, as learned from those that ended."""

from scheduler_svc.core.request import Request

_MEMORY = 200  # ended sequences of a kind over which the usual length is averaged
_UNSEEN = 256.0  # tokens, before anything has ended


class OutputLengths:
    """The usual length of outputs in tokens.

    Requests whose `max_tokens` have the same number of binary digits are of one kind. So those that left `max_tokens`
    out, which may use the rest of the context and rarely do, are apart from those that asked for a few tokens.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._means: dict[int, float] = {}

    def observe(self, request: Request, num_output: int) -> None:
        """A sequence of a request ended by itself after `num_output` tokens."""
        for kind in (request.max_tokens.bit_length(), 0):  # 0: of all kinds
            count = self._counts[kind] = min(_MEMORY, self._counts.get(kind, 0) + 1)
            mean = self._means.get(kind, 0.0)
            self._means[kind] = mean + (num_output - mean) / count

    def expected(self, request: Request) -> float:
        """The usual length of each sequence of a request; of all kinds if none of its kind has ended."""
        usual = self._means.get(request.max_tokens.bit_length(), self._means.get(0, _UNSEEN))
        return max(float(request.least_output), min(float(request.max_tokens), usual))
