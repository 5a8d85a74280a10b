"""Validation of best_of and beam search, over both protocols."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from gateway_requests import over_grpc, over_http, refused, sampling, stopping
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.unvalidated_request import ResponseMode
from gateway_svc.validated_request import BeamSearchParams, EarlyStopping
from quire.inference.v1 import inference_pb2 as api
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.scheduler.v1.scheduler_pb2 import RenderOptions
from svc_common.errors import Reason

INVALID = Reason.INVALID_FIELD
GROUPS = {sampling: "sampling.", stopping: "stopping."}


async def test_best_of_is_n_unless_given(tokenizer: ModelTokenizer) -> None:
    for one in (await over_grpc(tokenizer, text="a", n=3), await over_http(tokenizer, prompt="a", n=3)):
        assert (one.n, one.best_of, one.beam_search) == (3, 3, None)
    for one in (
        await over_grpc(tokenizer, text="a", n=3, best_of=5),
        await over_http(tokenizer, prompt="a", n=3, best_of=5),
    ):
        assert (one.n, one.best_of, one.to_proto(RenderOptions()).n) == (3, 5, 5)


async def test_best_of_is_at_least_n(tokenizer: ModelTokenizer) -> None:
    assert await refused(over_grpc(tokenizer, text="a", n=3, best_of=2)) == (INVALID, "generation.best_of")
    assert await refused(over_http(tokenizer, prompt="a", n=3, best_of=2)) == (INVALID, "best_of")


async def test_only_what_is_not_ranked_can_be_streamed(tokenizer: ModelTokenizer) -> None:
    streamed = ResponseMode.STREAMED
    assert await refused(over_grpc(tokenizer, streamed, text="a", best_of=2)) == (INVALID, "generation.best_of")
    assert await refused(over_http(tokenizer, prompt="a", stream=True, best_of=2)) == (INVALID, "best_of")
    assert (await over_grpc(tokenizer, streamed, text="a", n=2, best_of=2)).best_of == 2
    assert (await over_http(tokenizer, prompt="a", stream=True, n=2, best_of=2)).best_of == 2
    search = api.BeamSearch(width=2)
    beams = over_grpc(tokenizer, streamed, text="a", beam_search=search)
    assert await refused(beams) == (INVALID, "generation.beam_search")
    beams = over_http(tokenizer, prompt="a", stream=True, use_beam_search=True, best_of=2)
    assert await refused(beams) == (INVALID, "use_beam_search")


async def test_a_beam_search_over_both_protocols(tokenizer: ModelTokenizer) -> None:
    search = api.BeamSearch(width=4, length_penalty=0.5, early_stopping=api.EARLY_STOPPING_NEVER)
    over: dict[str, Any] = {"best_of": 4, "length_penalty": 0.5, "early_stopping": "never"}
    for one in (
        await over_grpc(tokenizer, text="a", n=2, beam_search=search),
        await over_http(tokenizer, prompt="a", n=2, use_beam_search=True, **over),
    ):
        assert one.beam_search == BeamSearchParams(4, 0.5, EarlyStopping.NEVER)
        assert (one.n, one.sampling.params["temperature"]) == (2, 0.0)
        submit = one.to_proto(RenderOptions())
        assert (submit.n, submit.beam_search.width, submit.beam_search.length_penalty) == (2, 4, 0.5)
        assert submit.beam_search.early_stopping == scheduler_v1.EARLY_STOPPING_NEVER
        assert not submit.sampling.HasField("logprobs")


async def test_defaults_of_a_beam_search(tokenizer: ModelTokenizer) -> None:
    expected = BeamSearchParams(3, 1.0, EarlyStopping.HEURISTIC)
    assert (await over_grpc(tokenizer, text="a", beam_search=api.BeamSearch(width=3))).beam_search == expected
    assert (await over_http(tokenizer, prompt="a", use_beam_search=True, n=3)).beam_search == expected
    assert not (await over_grpc(tokenizer, text="a")).to_proto(RenderOptions()).HasField("beam_search")


@pytest.mark.parametrize(
    ("search", "more", "grpc_field", "http", "http_field"),
    [
        ({"width": 1}, {}, "beam_search.width", {"best_of": 1}, "best_of"),
        ({"width": 65}, {}, "beam_search.width", {"best_of": 65}, "best_of"),
        ({"width": 1}, {}, "beam_search.width", {}, "n"),
        ({"width": 2}, {"n": 3}, "n", {"best_of": 2, "n": 3}, "n"),
        ({"width": 2, "length_penalty": 10.5}, {}, "beam_search.length_penalty", {"length_penalty": 10.5}, ""),
        ({"width": 2, "length_penalty": math.nan}, {}, "beam_search.length_penalty", {"length_penalty": math.nan}, ""),
        ({"width": 2, "early_stopping": 9}, {}, "beam_search.early_stopping", {"early_stopping": "soon"}, ""),
    ],
)
async def test_a_beam_search_out_of_its_ranges(
    search: dict[str, Any],
    more: dict[str, Any],
    grpc_field: str,
    http: dict[str, Any],
    http_field: str,
    tokenizer: ModelTokenizer,
) -> None:
    grpc = over_grpc(tokenizer, text="a", beam_search=api.BeamSearch(**search), **more)
    assert await refused(grpc) == (INVALID, f"generation.{grpc_field}")
    expected = http_field or grpc_field.removeprefix("beam_search.")
    fields: dict[str, Any] = http if http_field else {"best_of": 2} | http
    assert await refused(over_http(tokenizer, prompt="a", use_beam_search=True, **fields)) == (INVALID, expected)


@pytest.mark.parametrize(
    ("group", "name", "neutral", "value"),
    [
        (sampling, "temperature", 0, 0.5),
        (sampling, "top_p", 1, 0.5),
        (sampling, "top_k", -1, 4),
        (sampling, "min_p", 0, 0.1),
        (sampling, "presence_penalty", 0, 1),
        (sampling, "frequency_penalty", 0, 1),
        (sampling, "repetition_penalty", 1, 1.5),
        (sampling, "logit_bias", {1: 0}, {1: 1}),
        (stopping, "stop", [], ["x"]),
    ],
)
async def test_what_a_beam_search_would_not_heed_is_refused(
    group: Callable[..., dict[str, Any]], name: str, neutral: Any, value: Any, tokenizer: ModelTokenizer
) -> None:
    unserved, search = Reason.FEATURE_UNSUPPORTED, api.BeamSearch(width=2)
    assert await over_grpc(tokenizer, text="a", beam_search=search, **group(**{name: neutral}))
    assert await over_http(tokenizer, prompt="a", use_beam_search=True, n=2, **{name: neutral})
    grpc = over_grpc(tokenizer, text="a", beam_search=search, **group(**{name: value}))
    assert await refused(grpc) == (unserved, f"generation.{GROUPS[group]}{name}")
    http = over_http(tokenizer, prompt="a", use_beam_search=True, n=2, **{name: value})
    assert await refused(http) == (unserved, name)


async def test_a_beam_search_has_a_width_instead_of_best_of_and_no_biases(tokenizer: ModelTokenizer) -> None:
    unserved, search = Reason.FEATURE_UNSUPPORTED, api.BeamSearch(width=2)
    grpc = over_grpc(tokenizer, text="a", beam_search=search, best_of=2)
    assert await refused(grpc) == (unserved, "generation.best_of")
    grpc = over_grpc(tokenizer, text="a", beam_search=search, **sampling(logit_bias={1: 1}))
    assert await refused(grpc) == (unserved, "generation.sampling.logit_bias")
    http = over_http(tokenizer, prompt="a", use_beam_search=True, n=2, logit_bias={"1": 1})
    assert await refused(http) == (unserved, "logit_bias")


async def test_a_field_of_a_later_beam_search_is_refused_by_its_number(tokenizer: ModelTokenizer) -> None:
    search = api.BeamSearch.FromString(api.BeamSearch(width=2).SerializeToString() + b"\xf8\x07\x01")
    refusal = await refused(over_grpc(tokenizer, text="a", beam_search=search))
    assert refusal == (Reason.FEATURE_UNSUPPORTED, "generation.beam_search.127")
