"""The reader of a request whose result is a value."""

import pytest
from prometheus_client import generate_latest

from gateway_svc.change_signal import ChangeSignal
from gateway_svc.embeddings import EmbeddingParams, Normalization, Pooling
from gateway_svc.metrics import GatewayMetrics
from gateway_svc.reader import Release
from gateway_svc.running_value import RunningValue
from gateway_svc.scores import ScoreParams
from gateway_svc.validated_request import OnDisconnect
from gateway_svc.validated_value import ValidatedValue, ValueParams
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import length_end, value_end
from svc_common.errors import QuireError, Reason


def running(metrics: GatewayMetrics | None = None, params: ValueParams | None = None) -> RunningValue:
    """A request for the value of three tokens, by default their vector."""
    metrics = metrics or GatewayMetrics(["tiny"])
    params = params or EmbeddingParams(None, Pooling.MEAN, Normalization.L2)
    validated = ValidatedValue("id", "tiny", [5, 6, 7], params, 0, None)
    value = RunningValue(validated, validated.to_proto(), metrics.of_model("tiny"), ChangeSignal())
    value.prepare()
    return value


def test_the_value_is_the_end_of_the_sequence() -> None:
    value = running()
    value.on_accepted(True)
    assert not value.is_finished
    tokens = scheduler_v1.Tokens(end=value_end(0.5, -1.0), cached_tokens=2)
    assert value.on_tokens(tokens) == (Release(None),)
    assert value.is_finished
    assert value.value is not None
    assert value.value.tolist() == [0.5, -1.0]
    assert (value.usage.prompt_tokens, value.usage.completion_tokens, value.usage.cached_tokens) == (3, 0, 2)
    assert value.on_tokens(scheduler_v1.Tokens(end=value_end(9.0))) == ()
    value.on_failed(QuireError(Reason.INTERNAL, "late"))
    assert value.failure is None
    assert value.value.tolist() == [0.5, -1.0]


def test_a_new_scheduler_may_have_the_value_or_compute_it() -> None:
    for sequences in ([], [scheduler_v1.Tokens()]):
        value = running()
        assert value.on_attached(scheduler_v1.Attached(sequences=sequences), is_durable=True) == []
        assert not value.is_finished
    assert value.unflushed({0: 3}) == []
    attached = scheduler_v1.Attached(sequences=[scheduler_v1.Tokens(end=value_end(0.25))])
    assert value.on_attached(attached, is_durable=True) == [Release(None)]
    assert value.is_finished


def test_more_dimensions_than_the_model_has_are_refused() -> None:
    value = running(params=EmbeddingParams(dimensions=4))
    assert value.on_tokens(scheduler_v1.Tokens(end=value_end(0.5, 0.5, 0.5))) == (Release(None),)
    assert value.failure is not None
    assert (value.failure.reason, value.failure.field) == (Reason.INVALID_FIELD, "dimensions")
    assert "at most 3" in str(value.failure)


def test_a_score_is_one_number() -> None:
    for numbers, failure in (([0.5], None), ([0.5, 0.25], Reason.INTERNAL)):
        value = running(params=ScoreParams(2, is_raw=False))
        assert value.on_tokens(scheduler_v1.Tokens(end=value_end(*numbers))) == (Release(None),)
        assert (value.failure and value.failure.reason) == failure


def test_another_result_is_a_defect() -> None:
    value = running()
    assert value.on_tokens(scheduler_v1.Tokens(end=length_end())) == (Release(OnDisconnect.CANCEL),)
    assert value.failure is not None
    assert value.failure.reason is Reason.INTERNAL


@pytest.mark.parametrize("ends", [True, False])
def test_what_runs_is_counted_and_what_is_accepted(ends: bool) -> None:
    metrics = GatewayMetrics(["tiny"])

    def lines() -> str:
        return generate_latest(metrics.registry).decode()

    value = running(metrics)
    assert 'quire_gateway_requests_in_flight{model="tiny"} 1.0' in lines()
    value.on_accepted(True)
    if ends:
        value.on_tokens(scheduler_v1.Tokens(end=value_end(1.0)))
    value.close()
    assert 'quire_gateway_requests_in_flight{model="tiny"} 0.0' in lines()
    assert 'quire_gateway_prompt_tokens_total{model="tiny"} 3.0' in lines()
    assert 'quire_gateway_generation_tokens_total{model="tiny"} 0.0' in lines()
