"""The kinds of results, between the core's values and messages.

A kind is a field of quire.worker.v1.ResultKind, and the core uses that field's name. Those whose result is a value are
listed in `VALUE_CHECKS`: a new one is a field there, a line here, and its computation in the worker.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from quire.worker.v1 import worker_pb2 as worker_v1
from scheduler_svc.core.results import PROMPT_LOGPROBS, TOKENS, PromptComputation, ResultForm, ResultKind

ValueCheck = Callable[[worker_v1.ResultKind, worker_v1.PromptValue], str | None]
"""Returns what is wrong with a value, given the requested kind and the worker's value; None: nothing."""


def check_vector(_asked: worker_v1.ResultKind, value: worker_v1.PromptValue) -> str | None:
    """A vector has at least one number, and all are finite."""
    if not value.numbers:
        return "no numbers"
    return None if all(map(math.isfinite, value.numbers)) else "a number that is not finite"


VALUE_CHECKS: Mapping[str, ValueCheck] = {
    "embedding": check_vector,
    "score": check_vector,
}

_UNKNOWN = ResultKind("result of a kind that this scheduler does not know", ResultForm.VALUE)
_KINDS = {kind.name: kind for kind in (TOKENS, PROMPT_LOGPROBS)} | {
    name: ResultKind(name, ResultForm.VALUE) for name in VALUE_CHECKS
}

_COMPUTATIONS = {
    worker_v1.PROMPT_COMPUTATION_INDIVISIBLE: PromptComputation.INDIVISIBLE,
    worker_v1.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV: PromptComputation.INDIVISIBLE_WITHOUT_KV,
}


def kind_from_proto(result: worker_v1.ResultKind) -> ResultKind:
    """The kind of a message. No worker computes one that is unknown here."""
    name = result.WhichOneof("kind")
    return _UNKNOWN if name is None else _KINDS[name]


def computations_from_proto(computed: Seq[worker_v1.ComputedResult]) -> dict[str, PromptComputation]:
    """The kinds that a worker computes, and how, without unknown ones."""
    if not computed:
        return {TOKENS.name: PromptComputation.CHUNKED}
    kinds = [(kind_from_proto(one.result), one.computation) for one in computed]
    return {
        kind.name: _COMPUTATIONS.get(computation, PromptComputation.CHUNKED)
        for kind, computation in kinds
        if kind is not _UNKNOWN
    }
