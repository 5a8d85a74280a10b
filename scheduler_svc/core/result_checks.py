"""Which kinds of results can be requested: with which other parameters, and from which replicas."""

from collections.abc import Sequence as Seq

from scheduler_svc.core.admission import AdmissionRefusal
from scheduler_svc.core.events import Failure
from scheduler_svc.core.replica import Replica
from scheduler_svc.core.request import Request
from scheduler_svc.core.results import ResultForm


def refuse_combination(request: Request) -> str | None:
    """Which parameters a request's kind of result excludes, or None."""
    name = request.result.name
    if request.result.form is ResultForm.TOKENS:
        return None
    if request.beam is not None:
        return f"{name} cannot be asked for together with beam search"
    if not request.returns_value:
        return None
    if request.n > 1:
        return f"{name} cannot be asked for with n above 1: a prompt has one value"
    if request.max_tokens != 1 or request.min_tokens or request.stop_token_ids or request.has_stop_strings:
        return f"{name} has no tokens: it takes no max_tokens, min_tokens, stop tokens or stop strings"
    return None


def refuse_kind(request: Request, replicas: Seq[Replica]) -> AdmissionRefusal | None:
    """Why no replica computes a request's kind of result; None if one does, or if there are no replicas."""
    taking = [replica for replica in replicas if not replica.is_retired] or replicas
    if not taking or any(replica.shape.computes(request) for replica in taking):
        return None
    name = request.result.name
    if all(request.protocol > replica.shape.protocol for replica in taking):
        text = "has only workers of a release that does not have all of the request's parameters"
        return AdmissionRefusal(Failure.UNSUPPORTED_RESULT, text)
    steps = [replica.shape.longest_indivisible for replica in taking if name in replica.shape.results]
    if not steps:
        return AdmissionRefusal(Failure.UNSUPPORTED_RESULT, f"computes no {name}")
    text = f"this model computes the {name} of a prompt in one step, of at most {max(steps)} tokens"
    return AdmissionRefusal(Failure.CONTEXT_LENGTH_EXCEEDED, f"{text}, and the prompt has {len(request.prompt)}")
