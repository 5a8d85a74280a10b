"""Arguments of the classes: settings of the services, and arguments of vLLM's classes."""

from pathlib import Path
from typing import Any

import pytest

from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.settings import GatewaySettings
from quire_offline.settings import NAMES, OfflineSettings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings


def test_every_name_is_a_setting() -> None:
    known = WorkerSettings.model_fields | GatewaySettings.model_fields | SchedulerSettings.model_fields
    assert known.keys() >= NAMES
    assert not NAMES & {"host", "http_port", "worker_port", "redis_url", "insecure", "api_keys"}


def test_each_part_has_its_settings(tmp_path: Path) -> None:
    settings = OfflineSettings.of(
        {"model": str(tmp_path), "num_blocks": 7, "chat_template": "x", "policy": "fcfs", "swap_space": None}
    )
    assert (settings.worker.model, settings.worker.num_blocks, settings.worker.swap_space) == (str(tmp_path), 7, None)
    assert (settings.model.model, settings.model.chat_template) == (str(tmp_path), "x")
    assert settings.limits.policy == "fcfs"
    assert not settings.limits.policy_settings.short_prompts_first, "prompts are computed in the order of the engine"


@pytest.mark.parametrize("value", [{"depth": 2}, '{"depth": 2}'])
def test_variables_of_the_template_are_an_object_or_its_json(value: Any) -> None:
    for argument in ("chat_template_kwargs", "default_chat_template_kwargs"):
        assert OfflineSettings.of({argument: value}).model.chat_template_kwargs == '{"depth": 2}'


def test_settings_that_are_not_given_have_the_values_of_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NUM_BLOCKS", "9")
    assert OfflineSettings.of({}).worker.num_blocks == 9
    assert OfflineSettings.of({"num_blocks": 8}).worker.num_blocks == 8


def test_variables_of_other_settings_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_SCHEDULER_PORT", "tcp://10.0.0.7:50052")  # as Kubernetes sets it for a Service
    monkeypatch.setenv("QUIRE_HTTP_PORT", "zzz")
    monkeypatch.setenv("QUIRE_RECORD_KEYS_FILE", str(tmp_path / "absent"))
    monkeypatch.setenv("QUIRE_MODELS", str(tmp_path / "absent"))
    monkeypatch.setenv("QUIRE_UNKNOWN_FIELDS", "refuse")
    settings = OfflineSettings.of({})
    assert settings.worker.worker_port == 50053
    assert settings.undefined_fields is UndefinedFields.REFUSE, "quire batch --offline reads it"


@pytest.mark.parametrize(
    ("argument", "value", "setting", "expected"),
    [
        ("gpu_memory_utilization", 0.5, "memory_fraction", 0.5),
        ("max_num_seqs", 12, "max_sequences", 12),
        ("max_num_batched_tokens", 512, "max_step_tokens", 512),
        ("max_model_len", "4k", "max_model_len", 4000),
        ("dtype", "half", "dtype", "float16"),
        ("enforce_eager", True, "cuda_graphs", False),
        ("swap_space", 2, "swap_space", 2.0),
        ("trust_remote_code", True, "deterministic", False),
        ("tensor_parallel_size", 1, "deterministic", False),
        ("quantization", "int8", "quantization", "int8"),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 3}, "max_draft_tokens", 3),
    ],
)
def test_arguments_of_vllm_set_the_same_as_its_flags(argument: str, value: Any, setting: str, expected: Any) -> None:
    assert getattr(OfflineSettings.of({argument: value}).worker, setting) == expected


def test_log_probabilities_have_the_bound_of_vllms_argument() -> None:
    assert OfflineSettings.of({"max_logprobs": 50}).max_logprobs == 50
    assert OfflineSettings.of({}).max_logprobs == 20


def test_a_quantization_of_vllm_says_where_the_format_is_read() -> None:
    with pytest.raises(ValueError, match=r"^quantization: .*, not 'awq'; quantized checkpoints are recognised"):
        OfflineSettings.of({"quantization": "awq"})


@pytest.mark.parametrize(
    ("argument", "near"),
    [("num_bloks", "num_blocks"), ("gpu_memory_utilisation", "gpu_memory_utilization"), ("http_prt", None)],
)
def test_an_argument_that_does_not_exist_is_refused_with_the_nearest_one(argument: str, near: str | None) -> None:
    with pytest.raises(TypeError, match=f"no option {argument}{f'; did you mean {near}' if near else ''}"):
        OfflineSettings.of({argument: 1})


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("num_blocks", 0, "num_blocks: input should be greater than or equal to 1, not 0"),
        ("dtype", "float64", "dtype float64: must be one of"),
        ("seed", -1, "seed: input should be greater than or equal to 0, not -1"),
        ("tensor_parallel_size", 2, "tensor_parallel_size must be 1, not 2"),
        ("gpu_memory_utilization", 5, "gpu_memory_utilization: input should be less than or equal to 1, not 5$"),
        ("memory_high", 0.97, "^memory_critical is 0.95, which is not above memory_high, 0.97$"),
        ("port", 8000, "port is not an argument"),
        ("api_key", "secret", "^api_key is not an argument: it is about a server$"),
        ("enable_lora", True, "enable_lora is not served: adapters are not served"),
        ("data_parallel_size", 2, "data_parallel_size must be 1, not 2"),
        ("policy", "nothing", "policy: "),
        ("enable_auto_tool_choice", False, "is not served"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(argument: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OfflineSettings.of({argument: value})


@pytest.mark.parametrize(
    ("argument", "value"),
    [("enable_lora", False), ("cpu_offload_gb", 0), ("hf_overrides", {}), ("data_parallel_size", 1)],
)
def test_what_is_not_served_may_be_left_out_by_its_value(argument: str, value: Any) -> None:
    assert OfflineSettings.of({argument: value}) == OfflineSettings.of({})


def test_a_setting_of_a_variable_is_named_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_DTYPE", "float64")
    with pytest.raises(ValueError, match=r"^dtype: .* \(the variable QUIRE_DTYPE\)$"):
        OfflineSettings.of({})
    monkeypatch.setenv("QUIRE_DTYPE", "auto")
    settings = OfflineSettings.of({"gpu_memory_utilization": 0.5})
    text = "set QUIRE_DTYPE, QUIRE_NUM_BLOCKS or QUIRE_MEMORY_FRACTION, or QUIRE_CACHE_DIR"
    assert settings.in_arguments(text) == "set QUIRE_DTYPE, num_blocks or gpu_memory_utilization, or QUIRE_CACHE_DIR"
