"""Sampling parameters as values."""

import pickle

import pytest

from docs.tools.from_vllm import SAMPLING_PARAMS
from quire_offline import RequestOutputKind, SamplingParams


def test_parameters_have_the_names_of_vllm() -> None:
    params = SamplingParams(temperature=0.5, stop=("a", "b"), logit_bias={5: 1.0}, seed=None)
    assert (params.temperature, params.stop, params.seed, params.top_p) == (0.5, ["a", "b"], None, None)
    assert dict(params.values) == {"temperature": 0.5, "stop": ["a", "b"], "logit_bias": {"5": 1.0}}
    assert repr(SamplingParams(n=2)) == "SamplingParams(n=2)"
    assert SamplingParams(n=2) == SamplingParams(n=2) != SamplingParams(n=3)


@pytest.mark.parametrize("name", ["temprature", "stream", "retention", "prompt"])
def test_a_name_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"there is no option {name}"):
        SamplingParams(**{name: 1})


def test_an_output_kind_is_no_field_of_a_body() -> None:
    params = SamplingParams(n=2, output_kind=RequestOutputKind.DELTA)
    assert (params.output_kind, dict(params.values)) == (RequestOutputKind.DELTA, {"n": 2})
    assert SamplingParams().kind is RequestOutputKind.CUMULATIVE
    with pytest.raises(TypeError, match="output_kind: must be a RequestOutputKind, not int"):
        _ = SamplingParams(output_kind=1).kind


def test_parameters_have_names() -> None:
    with pytest.raises(TypeError, match=r"^SamplingParams takes its parameters by their names only$"):
        SamplingParams(1)


def test_an_attribute_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match="no parameter temprature"):
        _ = SamplingParams().temprature


def test_parameters_are_assigned_and_copied() -> None:
    params = SamplingParams(n=2, stop=["a"])
    copy = params.clone()
    copy.n = None
    copy.temperature = 0.5
    copy.stop.append("b")
    assert copy == SamplingParams(temperature=0.5, stop=["a", "b"])
    assert params == SamplingParams(n=2, stop=["a"]) == pickle.loads(pickle.dumps(params))
    with pytest.raises(TypeError, match="no option temprature; did you mean temperature"):
        copy.temprature = 1


@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [
        ("repetition_detection", None, {"min_count": 2}),
        ("watermarking", False, True),
        ("detokenize", True, False),
        ("extra_args", {}, {"a": 1}),
        ("stream_interval", 1, 4),
        ("trace_decode_token_ids", None, [3]),
    ],
)
def test_names_of_vllm_that_are_not_served_may_ask_for_nothing(name: str, neutral: object, value: object) -> None:
    assert SamplingParams(**{name: neutral}) == SamplingParams(**{name: None}) == SamplingParams()
    with pytest.raises(TypeError, match=f"^{name} is not served: leave it out"):
        SamplingParams(**{name: value})


def test_a_parameter_that_is_not_served_says_what_may_be_given() -> None:
    with pytest.raises(TypeError, match=r"^detokenize is not served: leave it out, or give True$"):
        SamplingParams(detokenize=False)
    with pytest.raises(TypeError, match=r"^repetition_detection is not served: leave it out$"):
        SamplingParams(repetition_detection={})
    with pytest.raises(TypeError, match=r"^guided_decoding is not served: use structured_outputs$"):
        SamplingParams(guided_decoding={"json": {}})


def test_every_parameter_of_vllm_is_known() -> None:
    assert SAMPLING_PARAMS.keys() <= SamplingParams.names | SamplingParams.not_served.keys()
