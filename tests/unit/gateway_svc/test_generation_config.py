"""Sampling defaults that the operator sets: their sources, their validation, and when they apply."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway_requests import digest_of, over_grpc, over_http, sampling, stopping
from gateway_svc.generation_config import load_generation_defaults
from gateway_svc.settings import BadSetting, GatewaySettings
from gateway_svc.tokenizer import ModelTokenizer
from gateway_svc.unvalidated_request import GenerationDefaults
from quire.inference.v1 import inference_pb2 as api
from svc_common.model_settings import ModelSettings
from svc_common.settings import read_settings
from tiny_model import CONTEXT_LENGTH

CONFIG: dict[str, Any] = {
    "eos_token_id": [2],
    "do_sample": True,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 20,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "max_new_tokens": 7,
}
SAMPLING = {"temperature": 0.25, "top_p": 0.5, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.5}
DEFAULTS = GenerationDefaults(SAMPLING, max_tokens=7)


def _write(directory: Path, config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def test_the_models_file_is_the_default_as_in_vllm(tmp_path: Path) -> None:
    settings = read_settings(GatewaySettings, [])
    assert (settings.generation_config, settings.override_generation_config) == ("auto", None)
    assert ModelSettings().generation_config == "auto"
    assert load_generation_defaults("quire", None, _write(tmp_path, CONFIG)) == GenerationDefaults()


@pytest.mark.parametrize("source", ["model", "auto"])
def test_the_models_file_may_be_taken(source: str, tmp_path: Path) -> None:
    assert load_generation_defaults(source, None, _write(tmp_path, CONFIG)) == DEFAULTS


def test_a_model_needs_no_file_unless_the_setting_names_it(tmp_path: Path) -> None:
    assert load_generation_defaults("auto", None, tmp_path) == GenerationDefaults()
    with pytest.raises(BadSetting, match=r"QUIRE_GENERATION_CONFIG is model, .* has no generation_config\.json"):
        load_generation_defaults("model", None, tmp_path)


def test_the_file_of_a_directory_may_be_taken(tmp_path: Path) -> None:
    model, other = _write(tmp_path / "model", CONFIG), _write(tmp_path / "other", {"top_k": 3, "temperature": None})
    assert load_generation_defaults(str(other), None, model) == GenerationDefaults({"top_k": 3})
    with pytest.raises(BadSetting, match="QUIRE_GENERATION_CONFIG is /no/where"):
        load_generation_defaults("/no/where", None, model)


def test_an_override_comes_before_the_file_and_null_takes_a_value_back(tmp_path: Path) -> None:
    model = _write(tmp_path, CONFIG)
    override = '{"temperature": 0, "top_p": null, "max_new_tokens": 9}'
    merged = {name: value for name, value in (SAMPLING | {"temperature": 0.0}).items() if name != "top_p"}
    assert load_generation_defaults("model", override, model) == GenerationDefaults(merged, max_tokens=9)
    assert load_generation_defaults("quire", override, model) == GenerationDefaults({"temperature": 0.0}, max_tokens=9)


def test_an_override_is_a_variable_or_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    override = '{"temperature": 0.5, "top_k": 4}'
    assert read_settings(GatewaySettings, ["--override-generation-config", override]).override_generation_config == (
        override
    )
    monkeypatch.setenv("QUIRE_OVERRIDE_GENERATION_CONFIG", override)
    assert read_settings(GatewaySettings, []).override_generation_config == override


OUT_OF_RANGE = [
    ("temperature", 2.001),
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", float("nan")),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", 11),
    ("max_new_tokens", 0),
    ("max_new_tokens", 2.5),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_what_no_request_may_ask_for_is_refused_by_variable_and_field(name: str, value: Any, tmp_path: Path) -> None:
    config = {name: value}
    with pytest.raises(BadSetting, match=rf"^QUIRE_OVERRIDE_GENERATION_CONFIG: {name} must be .*, not "):
        load_generation_defaults("quire", json.dumps(config), tmp_path)
    _write(tmp_path, config)
    with pytest.raises(BadSetting, match=rf"^QUIRE_GENERATION_CONFIG: .*json: {name} must be .*, not "):
        load_generation_defaults("model", None, tmp_path)


def test_an_override_holds_nothing_that_would_not_be_heeded(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="QUIRE_OVERRIDE_GENERATION_CONFIG: max_tokens is not one of temperature, "):
        load_generation_defaults("quire", '{"max_tokens": 3}', tmp_path)


@pytest.mark.parametrize(("text", "why"), [("[", "is not JSON"), ("[1]", "is not a JSON object"), ("7", "object")])
def test_what_is_no_object_is_refused(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=f"QUIRE_OVERRIDE_GENERATION_CONFIG .*{why}|CONFIG {why}"):
        load_generation_defaults("quire", text, tmp_path)
    with pytest.raises(BadSetting, match=f"QUIRE_GENERATION_CONFIG: .*{why}"):
        load_generation_defaults("model", None, _write(tmp_path, text))


async def test_both_protocols_get_the_defaults(tokenizer: ModelTokenizer) -> None:
    for one in (
        await over_grpc(tokenizer, defaults=DEFAULTS, text="a"),
        await over_http(tokenizer, defaults=DEFAULTS, prompt="a"),
        await over_http(tokenizer, defaults=DEFAULTS, messages=[{"role": "user", "content": "a"}]),
        await over_http(tokenizer, defaults=DEFAULTS, prompt="a", temperature=None, max_tokens=None),
    ):
        drawn = one.sampling
        assert (drawn.params["temperature"], drawn.params["top_p"], drawn.params["top_k"], drawn.params["min_p"]) == (
            0.25,
            0.5,
            20,
            0.125,
        )
        assert (drawn.params["repetition_penalty"], one.stopping.max_tokens) == (1.5, 7)
        assert (drawn.params["presence_penalty"], drawn.params["frequency_penalty"]) == (0.0, 0.0)


async def test_values_of_the_request_override_defaults_even_if_neutral(tokenizer: ModelTokenizer) -> None:
    asked: dict[str, Any] = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    for one in (
        await over_grpc(tokenizer, defaults=DEFAULTS, text="a", **sampling(**asked), **stopping(max_tokens=30)),
        await over_http(tokenizer, defaults=DEFAULTS, prompt="a", max_tokens=30, **asked),
    ):
        drawn = one.sampling
        assert (drawn.params["temperature"], drawn.params["top_p"], drawn.params["top_k"], drawn.params["min_p"]) == (
            0.0,
            1.0,
            0,
            0.0,
        )
        assert (drawn.params["repetition_penalty"], one.stopping.max_tokens) == (1.0, 30)


async def test_a_field_that_is_given_leaves_the_others_their_defaults(tokenizer: ModelTokenizer) -> None:
    one = await over_grpc(tokenizer, defaults=DEFAULTS, text="a", **sampling(temperature=1.75))
    assert (one.sampling.params["temperature"], one.sampling.params["top_p"], one.sampling.params["top_k"]) == (
        1.75,
        0.5,
        20,
    )


async def test_a_default_length_is_limited_by_the_context(tokenizer: ModelTokenizer) -> None:
    one = await over_grpc(tokenizer, defaults=DEFAULTS, token_ids=api.TokenIds(ids=[5] * (CONTEXT_LENGTH - 3)))
    assert one.stopping.max_tokens == 3


async def test_a_beam_search_gets_no_default_of_sampling(tokenizer: ModelTokenizer) -> None:
    for one in (
        await over_grpc(tokenizer, defaults=DEFAULTS, text="a", beam_search=api.BeamSearch(width=2)),
        await over_http(tokenizer, defaults=DEFAULTS, prompt="a", use_beam_search=True, n=2),
    ):
        drawn = one.sampling
        assert (
            drawn.params["temperature"],
            drawn.params["top_p"],
            drawn.params["top_k"],
            drawn.params["repetition_penalty"],
        ) == (0.0, 1.0, 0, 1.0)
        assert one.stopping.max_tokens == 7


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "a"},
        {"prompt": "a", "temperature": 0, "min_tokens": 2},
        {"prompt": "a", "max_tokens": 30, "top_k": 3},
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "use_beam_search": True, "n": 2},
    ],
    ids=str,
)
async def test_a_request_is_the_same_whatever_the_defaults(asked: dict[str, Any], tokenizer: ModelTokenizer) -> None:
    greedy = GenerationDefaults({"temperature": 0.0, "top_k": 0}, max_tokens=CONTEXT_LENGTH)
    digests = {
        digest_of(await over_http(tokenizer, defaults=defaults, **asked), tokenizer)
        for defaults in (None, DEFAULTS, greedy)
    }
    assert len(digests) == 1


async def test_a_value_that_is_given_makes_another_request(tokenizer: ModelTokenizer) -> None:
    fields: list[dict[str, Any]] = [{}, {"temperature": 0}, {"temperature": 0.5}, {"max_tokens": 8}, {"top_k": 20}]
    asked = [await over_http(tokenizer, defaults=DEFAULTS, prompt="a", **more) for more in fields]
    assert len({digest_of(one, tokenizer) for one in asked}) == len(fields)
