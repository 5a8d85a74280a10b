"""Flags of `vllm serve`: each sets settings that exist, changes nothing, or is refused by name with advice."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway_svc.key_file import digest_of, read_key_file
from gateway_svc.message_formats.formats import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.sampling_fields import HIGHEST_MAX_LOGPROBS
from gateway_svc.settings import GatewaySettings
from quire_client.cli.app import run
from scheduler_svc.settings import SchedulerSettings
from svc_common.settings import ServiceSettings, read_settings
from svc_common.supervisor import serve
from svc_common.supervisor.console import Console
from svc_common.supervisor.settings import SupervisorSettings
from svc_common.supervisor.vllm_flag_table import FLAGS, SERVED
from svc_common.supervisor.vllm_flags import (
    ApiKeys,
    Choice,
    FlagFile,
    FlagRefused,
    JsonFields,
    JsonObject,
    Switch,
    Value,
    Values,
)
from svc_common.supervisor.vllm_values import OneOf
from worker_svc.settings import WorkerSettings

KINDS: tuple[type[ServiceSettings], ...] = (SupervisorSettings, GatewaySettings, SchedulerSettings, WorkerSettings)
OTHERS = {"HF_TOKEN", "HF_HUB_CACHE", "OTEL_EXPORTER_OTLP_ENDPOINT"}


def names_of_variables() -> set[str]:
    found: set[str] = set()
    for flag in SERVED:
        if isinstance(flag, Choice | JsonObject | Value | Values | Switch):
            found.add(flag.variable)
        elif isinstance(flag, JsonFields):
            found |= {*flag.variables.values(), *flag.constant}
        else:
            assert isinstance(flag, ApiKeys | FlagFile)
    return found


def test_each_flag_has_one_meaning_and_sets_variables_that_are_read() -> None:
    names = [name for flag in FLAGS for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names)) > 300
    settings = {f"QUIRE_{name.upper()}" for kind in KINDS for name in kind.model_fields}
    assert names_of_variables() - OTHERS <= settings


def test_common_flags_set_the_settings_of_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "Qwen/Qwen3-0.6B --served-model-name chat qwen --port 8100 --host 0.0.0.0 --dtype half --max-model-len 8k "
        "--max_num_seqs=32 --max-num-batched-tokens 2K --gpu-memory-utilization 0.8 --enforce-eager --block-size 32 "
        "--kv-cache-dtype fp8_e4m3 --generation-config vllm --tool-call-parser hermes --reasoning-parser qwen3 "
        "--enable-auto-tool-choice --enable-prefix-caching -tp 1 --scheduling-policy priority --swap-space 2 "
        "--allowed-origins ['https://a.example','https://b.example'] --workers 2 --uvicorn-log-level trace "
        f"--root-path /llm --enable-force-include-usage --max-logprobs {HIGHEST_MAX_LOGPROBS} --uds /tmp/quire.sock "
        "--return-tokens-as-token-ids --seed 7 --exclude-tools-when-tool-choice-none"
    )
    arguments = [one.replace("'", '"') for one in line.split()]
    arguments += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
    arguments += ["--speculative-config.num_speculative_tokens", "3", "--structured-outputs-config.backend", "xgrammar"]
    arguments += ["--override-generation-config", '{"temperature": 0}']
    arguments += ["--default-chat-template-kwargs.enable_thinking", "false"]
    for name, value in serve.variables_of(arguments).items():
        monkeypatch.setenv(name, value)

    everything = read_settings(SupervisorSettings, [])
    gateway, scheduler = read_settings(GatewaySettings, []), read_settings(SchedulerSettings, [])
    worker = read_settings(WorkerSettings, [])
    assert (everything.host, everything.http_port, everything.workers) == ("0.0.0.0", 8100, 2)
    assert (everything.model, everything.log_level) == ("Qwen/Qwen3-0.6B", "debug")
    (model,) = gateway.model_settings()
    assert model.served_names == ("chat", "qwen")
    assert (model.generation_config, model.override_generation_config) == ("quire", '{"temperature": 0}')
    assert model.chat_template_kwargs == '{"enable_thinking": false}'
    assert (model.tool_format, model.reasoning_format) == ("hermes", "think")
    assert gateway.cors_origins == "https://a.example,https://b.example"
    assert (gateway.root_path, gateway.stream_usage, gateway.max_logprobs) == ("/llm", True, HIGHEST_MAX_LOGPROBS)
    assert (gateway.tokens_as_token_ids, gateway.seed) == (True, 7)
    assert everything.uds == gateway.uds == Path("/tmp/quire.sock")
    assert (scheduler.policy, scheduler.max_sequences, scheduler.max_step_tokens) == ("priority", 32, 2048)
    assert (worker.model, worker.dtype, worker.max_model_len) == ("Qwen/Qwen3-0.6B", "float16", 8000)
    assert (worker.memory_fraction, worker.block_size, worker.kv_cache_dtype) == (0.8, 32, "fp8")
    assert (worker.cuda_graphs, worker.swap_space) == (False, 2)
    assert (worker.drafter, worker.max_draft_tokens) == ("ngram", 3)


@pytest.mark.parametrize(
    ("arguments", "task"),
    [
        (["--runner", "pooling"], "pooling"),
        (["--runner=generate"], "generate"),
        (["--convert", "embed"], "embed"),
        (["--convert", "classify"], "pooling"),
        (["--runner", "pooling", "--convert", "classify"], "pooling"),
        (["--runner", "pooling", "--convert", "auto"], "pooling"),
        (["--runner", "auto", "--convert", "none"], None),
    ],
)
def test_a_runner_and_a_conversion_are_a_task(arguments: list[str], task: str | None) -> None:
    assert serve.variables_of(arguments).get("QUIRE_TASK") == task


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--runner", "draft"], "--runner draft: must be one of auto, generate, pooling"),
        (["--convert", "reward"], "--convert reward: must be one of auto, none, embed, classify"),
        (["--enable-lora"], "--enable-lora is not served: adapters are not served"),
        (["--lora_modules", "a=b"], "--lora-modules is not served"),
        (["--watermark-config", '{"key": 1}'], "--watermark-config is not served: outputs have no watermark"),
        (["--enable-sleep-mode"], "--enable-sleep-mode is not served: Quire has no such feature"),
        (["-q", "awq"], "--quantization is not served: quantized checkpoints are "),
        (["--quantization=fp8"], "--quantization is not served"),
        (["--compilation-config.mode", "3"], "--compilation-config is not served"),
        (["-O3"], "--optimization-level is not served: QUIRE_KERNELS chooses"),
        (["-n2"], "--nnodes must be 1, not 2"),
        (["--max-model-len.min", "8k"], "--max-model-len.min is not known"),
        (["--enable-prefix-caching.algo", "8k"], "--enable-prefix-caching.algo is not known"),
        (["--override-generation-config", "0.5"], "--override-generation-config: must be a JSON object, not '0.5'"),
        (
            ["--no-enable-auto-tool-choice"],
            "--no-enable-auto-tool-choice is not served: a request's",
        ),
        (
            ["--no-exclude-tools-when-tool-choice-none"],
            "--no-exclude-tools-when-tool-choice-none is not served: with `none`",
        ),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size must be 1, not 2: a model uses one GPU"),
        (["-tp=4"], "--tensor-parallel-size must be 1, not 4"),
        (["--max-num-seq", "3"], "--max-num-seq is not known: did you mean --max-num-seqs?"),
        (["--max-model-len", "-2"], "--max-model-len -2: must be a whole number"),
        (["--api-key", "a", ""], "--api-key: a key must not be empty"),
        (
            ["--speculative-config", '{"num_speculative_tokens": null}'],
            "num_speculative_tokens must be a text or a number",
        ),
        (["--max-model-len", "1.0005k"], "must be a whole number"),
        (["--max-logprobs", "-1"], "--max-logprobs -1: must be a whole number from 0 to 128"),
        (["--max-logprobs", "129"], "--max-logprobs 129: must be a whole number from 0 to 128"),
        (["--dtype", "int4"], "--dtype int4: must be one of auto, float32"),
        (["--port"], "--port needs a value"),
        (["--port", "--host"], "--port needs a value"),
        (["--no-port"], "--no-port is not a flag: --port has a value"),
        (["--enforce-eager=1"], "--enforce-eager has no value"),
        (["--enable-lora=0"], "--enable-lora has no value"),
        (["--no-quantization"], "--no-quantization is not a flag: --quantization has a value"),
        (["--hf-overrides.rope_scaling", "0"], "--hf-overrides is not served"),
        (["--cpu-offload-gb"], "--cpu-offload-gb is not served"),
        (["a", "b"], "b: there is one MODEL, a"),
        (["--allowed-origins", "https://a.example"], "--allowed-origins https://a.example: must be a JSON list"),
        (["--speculative-config", "ngram"], "--speculative-config: must be a JSON object"),
        (["--speculative-config", '{"method": "eagle"}'], '--speculative-config: method must be "ngram", not "eagle"'),
        (["--speculative-config", '{"draft_sample_method": 3}'], "the key draft_sample_method is not served"),
        (["--speculative-config.method", "eagle"], '--speculative-config: method must be "ngram", not "eagle"'),
        (["--structured-outputs-config.enable_in_reasoning", "true"], "the key enable_in_reasoning is not served"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_flag_that_is_not_served_is_refused_by_name(arguments: list[str], text: str) -> None:
    with pytest.raises(FlagRefused) as error:
        serve.variables_of(arguments)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--max-model-len", "8k", "--max-model-len", "auto"], {"QUIRE_MAX_MODEL_LEN": ""}),
        (["--max-model-len", "-1"], {"QUIRE_MAX_MODEL_LEN": ""}),
        (
            ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}'],
            {"QUIRE_DRAFTER": "ngram"},
        ),
        (["--trust-remote-code", "--seed", "0"], {"QUIRE_SEED": "0"}),
        (["--no-enforce-eager", "m"], {"QUIRE_CUDA_GRAPHS": "1", "QUIRE_MODEL": "m"}),
        (["--model", "a", "b"], {"QUIRE_MODEL": "b"}),
        (["m", "--port", "1", "--port=2"], {"QUIRE_MODEL": "m", "QUIRE_HTTP_PORT": "2"}),
        (["--disable-log-stats", "--max-log-len", "3", "m"], {"QUIRE_MODEL": "m"}),
        (["--language-model-only", "m"], {"QUIRE_MODEL": "m"}),
        (["--http-port", "0", "--api-keys", "f"], {"QUIRE_HTTP_PORT": "0", "QUIRE_API_KEYS": "f"}),
        (["--max-num-batched-tokens", "1.5m"], {"QUIRE_MAX_STEP_TOKENS": "1500000"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_last_flag_of_a_name_counts(arguments: list[str], variables: dict[str, str]) -> None:
    assert serve.variables_of(arguments) == variables


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-enable-lora"],
        ["--no_enable_expert_parallel"],
        ["--no-disable-fastapi-docs"],
        ["--cpu-offload-gb", "0"],
        ["--cpu-offload-gb=0.0"],
        ["--hf-overrides", "{}"],
        ["--quantization", "null"],
        ["-q="],
        ["-O0"],
    ],
    ids=" ".join,
)
def test_a_flag_that_is_not_served_may_ask_for_nothing(arguments: list[str]) -> None:
    assert serve.variables_of([*arguments, "m"]) == {"QUIRE_MODEL": "m"}


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--override-generation-config.temperature", "0.5"], {"temperature": 0.5}),
        (
            ["--override-generation-config.temperature=0.5", "--override_generation_config.top-p=1"],
            {"temperature": 0.5, "top_p": 1},
        ),
        (
            ["--override-generation-config", '{"top_k": 3, "top_p": 1}', "--override-generation-config.top_p", "0.5"],
            {"top_k": 3, "top_p": 0.5},
        ),
        (["--override-generation-config.top_k", "3", "--override-generation-config", '{"top_p": 1}'], {"top_p": 1}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_keys_of_an_object_may_be_flags_of_their_own(arguments: list[str], value: dict[str, float]) -> None:
    assert json.loads(serve.variables_of(arguments)["QUIRE_OVERRIDE_GENERATION_CONFIG"]) == value


def test_a_length_that_is_that_of_the_model_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "100")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", started(monkeypatch, "--max-model-len", "auto")["QUIRE_MAX_MODEL_LEN"])
    assert read_settings(WorkerSettings, []).max_model_len is None


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, str]:
    """The QUIRE_ variables with which `serve` starts the supervisor."""
    found: dict[str, str] = {}

    def supervise(settings: SupervisorSettings, console: Console) -> None:
        found.update({name: value for name, value in os.environ.items() if name.startswith("QUIRE_")})

    monkeypatch.setattr(serve, "run", supervise)
    monkeypatch.setattr(sys, "argv", ["serve", *arguments])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    serve.main()
    return found


def test_api_keys_are_written_as_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = started(monkeypatch, "m", "--api-key", "token-abc123", "other", "--run-dir", str(tmp_path))
    path = Path(variables["QUIRE_API_KEYS"])
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o600
    assert "token" not in path.read_text()
    keys = read_key_file(path)
    assert {key.digest for key in keys.keys} == {digest_of("token-abc123"), digest_of("other")}
    assert {key.tenant.name for key in keys.keys} == {"default"}


def test_a_second_start_in_the_directory_leaves_the_api_keys_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Path(started(monkeypatch, "--api-key", "first", "--run-dir", str(tmp_path))["QUIRE_API_KEYS"])
    second = Path(started(monkeypatch, "--api-key", "second", "--run-dir", str(tmp_path))["QUIRE_API_KEYS"])
    with pytest.raises(SystemExit):
        started(monkeypatch, "--api-key", "third", "--port", "none", "--run-dir", str(tmp_path))
    for path, key in ((first, "first"), (second, "second")):
        assert [one.digest for one in read_key_file(path).keys] == [digest_of(key)]


def test_api_keys_that_cannot_be_written_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(SystemExit):
        started(monkeypatch, "--api-key", "first", "--run-dir", str(tmp_path))
    assert capsys.readouterr().err.endswith(".toml cannot be written: no space left on device\n")
    assert not list(tmp_path.iterdir())


def test_a_refusal_ends_the_command_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        started(monkeypatch, "m", "--enable-lora")
    assert end.value.code == 2
    assert capsys.readouterr().err == "quire serve: --enable-lora is not served: adapters are not served\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: input should be less than or equal to 1, not"),
        (["--max_num_seqs=0"], "--max-num-seqs: input should be greater than or equal to 1, not '0'"),
        (["--chat-template", "/nonexistent"], "--chat-template: /nonexistent cannot be read: No such file or"),
        (["--tool-call-parser", "foo"], "--tool-call-parser: foo is not one of auto, none, "),
        (["--reasoning-parser", "foo"], "--reasoning-parser: foo is not one of auto, none, "),
        (["--port", "99999"], "--port: input should be less than or equal to 65535, not '99999'"),
        (["--workers", "0"], "--workers: input should be greater than or equal to 1, not '0'"),
        (["--seed", "x"], "--seed: input should be a valid integer"),
        (["--gateways", "2", "--uds", "s"], "--uds: is for one gateway, and --gateways is more"),
        (["--workers", "0", "--port", "-1"], "--port: input should be greater than or equal to 0, not '-1'; --workers"),
        (["--ssl-certfile", "/none", "--ssl-keyfile", "/none"], "--ssl-certfile: /none"),
        (["--redis-url", "foo"], "--redis-url: not a URL of a Redis, such as redis://host:6379/0, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_value_that_a_service_would_refuse_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as end:
        started(monkeypatch, *arguments)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire serve: {text}")


def test_a_value_of_a_variable_is_refused_by_the_name_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_MAX_SEQUENCES", "0")
    with pytest.raises(SystemExit):
        started(monkeypatch)
    assert capsys.readouterr().err.startswith("quire serve: QUIRE_MAX_SEQUENCES: input should be greater")


def test_variables_that_the_supervisor_sets_itself_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SCHEDULERS_AT", "not an address")
    assert started(monkeypatch)["QUIRE_SCHEDULERS_AT"] == "not an address"


def test_the_help_lists_the_flags_that_set_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(monkeypatch, "--help") == {}
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert {"--max-num-seqs", "--workers", "--gateways", "--models", "--state-file", "--redis-url"} <= set(listed)
    assert len(listed) == len(set(listed))


def test_the_command_line_passes_all_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *call: calls.append(call))
    arguments = ["m", "-tp", "1", "--port", "0", "--no-enforce-eager", "--help"]
    assert run(["serve", *arguments]) == 0
    assert calls == [(sys.executable, [sys.executable, "-m", "svc_common.supervisor.serve", *arguments])]


def test_parsers_of_vllm_are_formats() -> None:
    """Each name that stands for another is of a format that exists, and hides none."""
    for flag, formats in (("--tool-call-parser", TOOL_FORMATS), ("--reasoning-parser", REASONING_FORMATS)):
        (convert,) = (one.convert for one in SERVED if isinstance(one, Value) and one.name == flag)
        assert isinstance(convert, OneOf)
        assert set(convert.names.values()) <= formats.keys()
        assert convert.names.keys().isdisjoint(formats)


FLAGS_FILE = """
model: org/model
max_model_len: 8k
port: 8100
enforce-eager: true
enable-lora: false
override-generation-config: {temperature: 0.5}
default-chat-template-kwargs.depth: 2
served-model-name: [chat, qwen]
chat-template: -{{ messages }}
"""


def test_a_file_has_flags_and_those_of_the_command_win(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(FLAGS_FILE)
    of_file = {
        "QUIRE_MODEL": "org/model",
        "QUIRE_MAX_MODEL_LEN": "8000",
        "QUIRE_HTTP_PORT": "8100",
        "QUIRE_SERVED_MODEL_NAME": "chat,qwen",
        "QUIRE_CUDA_GRAPHS": "0",
        "QUIRE_OVERRIDE_GENERATION_CONFIG": '{"temperature": 0.5}',
        "QUIRE_CHAT_TEMPLATE_KWARGS": '{"depth": 2}',
        "QUIRE_CHAT_TEMPLATE": "-{{ messages }}",
    }
    assert serve.variables_of(["--config", str(path)]) == of_file
    arguments = ["other", "--port", "1", f"--config={path}", "--override-generation-config.top_p", "1"]
    assert serve.variables_of(arguments) == {
        **of_file,
        "QUIRE_MODEL": "other",
        "QUIRE_HTTP_PORT": "1",
        "QUIRE_OVERRIDE_GENERATION_CONFIG": '{"temperature": 0.5, "top_p": 1}',
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("port: [", "--config: .*flags.yaml cannot be read: "),
        ("port: 2026-13-01", "--config: .*flags.yaml cannot be read: "),
        (f"port: {'1' * 5000}", "--config: .*flags.yaml cannot be read: "),
        ("port", "--config: .*flags.yaml must have flags without dashes"),
        ("", "--config: .*flags.yaml must have flags without dashes"),
        ("port:", "--config: .*flags.yaml: port must be a text, a number, .*, not None"),
        ("port: 2026-01-01", "port must be a text, a number, .*, not datetime"),
        ("prot: 1", "--prot is not known: did you mean --port"),
        ("enable-lora: true", "--enable-lora is not served"),
        ("config: other.yaml", "--config is no flag of a file"),
        ('enforce-eager: "true"', "--enforce-eager has no value"),
        ("port: [1, 2]", "--config: 2 is the value of no flag"),
        ("served-model-name: [chat, true]", "served-model-name must be a text, .*, not True"),
        ("default-chat-template-kwargs: {date: 2026-01-01}", "kwargs cannot be written as JSON: .* date"),
        ("default-chat-template-kwargs: {depth: .nan}", "kwargs cannot be written as JSON: "),
        ("default-chat-template-kwargs: &a {depth: *a}", "kwargs cannot be written as JSON: Circular"),
        ("!!python/object/apply:os.getcwd []", "cannot be read: "),
    ],
)
def test_what_is_wrong_with_a_file_of_flags_is_said(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    with pytest.raises(FlagRefused, match=why):
        serve.variables_of(["--config", str(path)])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--config"], "^--config needs a value"),
        (["--config", "a.yaml", "--config=b.yaml"], "^--config: there is one file, not 2"),
        (["--config", "/nonexistent.yaml"], "^--config: /nonexistent.yaml cannot be read: "),
    ],
)
def test_there_is_one_file_of_flags(arguments: list[str], why: str) -> None:
    with pytest.raises(FlagRefused, match=why):
        serve.variables_of(arguments)
