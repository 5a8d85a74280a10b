"""`quire explain` with a real server and scripted responses: the output for a person."""

import asyncio
import json
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from typer.testing import CliRunner, Result

from quire.admin.v1 import admin_pb2 as pb
from quire_client.cli.app import app, run
from scripted_admin import ScriptedAdmin

KEY = "5f" * 32
NOTHING = Duration()


async def invoke(*args: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["explain", *args])


def explanation(*sequences: pb.SequenceExplanation, **fields: Any) -> pb.ExplainResponse:
    known: dict[str, Any] = {
        "key": KEY,
        "tenant": "search",
        "policy": "fair",
        "age": Duration(seconds=61),
        "num_prompt_tokens": 1_200,
        "max_tokens": 20,
        "num_waiting": 7,
        "model": "small",
    }
    return pb.ExplainResponse(**(known | fields), sequences=sequences)


def sequence(state: str, **fields: Any) -> pb.SequenceExplanation:
    return pb.SequenceExplanation(state=f"SEQUENCE_STATE_{state}", **fields)


async def test_a_waiting_request_is_explained_as_text(admin: ScriptedAdmin) -> None:
    waiting = sequence(
        "SWAPPED",
        num_ahead=3,
        num_known_tokens=1_205,
        num_computed_tokens=1_204,
        num_generated_tokens=5,
        num_device_blocks=40,
        num_host_blocks=36,
        num_missing_blocks=36,
        num_preemptions=2,
        last_preemption=pb.Preemption(
            choice=pb.RETURN_SWAP,
            swap_estimate=Duration(nanos=12_300_000),
            recompute_estimate=Duration(seconds=1, nanos=500_000_000),
        ),
        predicted_start=Duration(seconds=4),
    )
    admin.explanation = explanation(
        waiting, priority=-1, effective_priority=1, tenant_debt=4_000, time_left=Duration(seconds=30)
    )

    result = await invoke("mine", "--tenant", "search")

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "Was preempted, and waits with its blocks in host memory, behind 3 sequences",
        "  starts       in about 4 s, as predicted",
        "  tokens       1,204 of 1,205 computed, 5 generated",
        "  blocks       40 on the device, 36 on the host, 36 missing",
        "  preempted    2 times, the last by swap: 12.3 ms by estimate, recompute 1.5 s",
        "The request arrived 61 s ago, and has 30 s until its deadline; 1,200 tokens of prompt, at most 20 more.",
        "  model        small",
        "  class        -1, counts as 1 now",
        "  tenant       search, 4,000 tokens ahead of the least served one that waits, or waited last",
        "  queue        7 requests waiting, policy fair",
        f"  key          {KEY}",
    ]
    assert admin.requests == [pb.ExplainRequest(name=pb.RequestName(tenant="search", request_id="mine"))]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (sequence("QUEUED", num_ahead=1), "Waits for its turn, behind 1 sequence"),
        (sequence("QUEUED", num_ahead=0), "Waits for its turn, which is next"),
        (
            sequence("QUEUED", num_ahead=0, num_missing_blocks=2),
            "Waits for its turn; it is next, once there are blocks",
        ),
        (
            sequence("WAITING_FOR_PREFIX", awaits_key=KEY),
            "Waits while request 5f5f5f5f5f5f computes the prefix of its prompt",
        ),
        (
            sequence("HELD_BACK", num_ahead=0),
            "Waits for room within the limits of its API key, which is next",
        ),
        (sequence("SWAPPING_IN"), "Waits for its blocks, which are being swapped in from host memory"),
        (sequence("RUNNING"), "Runs"),
        (sequence("PAUSED"), "Pauses until its gateway has searched its text for stop strings"),
        (sequence("WAITING_FOR_TOKENS"), "Waits for the key's token budget: its tokens_per_minute are used up"),
        (sequence("PREEMPTED", num_ahead=2), "Was preempted, and waits to recompute its tokens, behind 2 sequences"),
        (sequence("SWAPPED"), "Was preempted, and waits with its blocks on its worker's device"),
        (sequence("ENDED"), "Has ended"),
        (sequence("UNSPECIFIED"), "Is in a state that this version of the client does not know"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_every_state_has_its_sentence(given: pb.SequenceExplanation, expected: str, admin: ScriptedAdmin) -> None:
    admin.explanation = explanation(given)

    assert (await invoke("mine")).stdout.splitlines()[0] == expected


async def test_each_sequence_is_explained(admin: ScriptedAdmin) -> None:
    admin.explanation = explanation(
        sequence("ENDED", index=0, num_generated_tokens=9), sequence("RUNNING", index=1, num_known_tokens=3)
    )

    lines = (await invoke("mine")).stdout.splitlines()

    assert lines[:5] == [
        "[0] has ended",
        "  tokens       9 generated",
        "[1] runs",
        "  tokens       0 of 3 computed, 0 generated",
        "  blocks       0 on the device, 0 on the host",
    ]


async def test_workers_that_are_short_of_memory_are_named(admin: ScriptedAdmin) -> None:
    short = pb.WorkerMemory(worker="10.0.0.1:50053", model="small", pressure=pb.MEMORY_PRESSURE_CRITICAL)
    admin.explanation = explanation(sequence("QUEUED", num_ahead=0), workers_short_of_memory=[short])
    admin.listed = pb.ListRequestsResponse(workers_short_of_memory=[short])

    assert "  memory       short at worker 10.0.0.1:50053: critical" in (await invoke("mine")).stdout.splitlines()
    assert (await invoke()).stdout.splitlines()[-1] == "Memory is short at worker 10.0.0.1:50053 of small: critical"
    (given,) = json.loads((await invoke("--json")).stdout)["workers_short_of_memory"]
    assert given == {"worker": "10.0.0.1:50053", "model": "small", "pressure": "critical"}


async def test_workers_that_are_set_apart_are_named(admin: ScriptedAdmin) -> None:
    apart = pb.WorkerSetApart(worker="10.0.0.1:50053", why="its epoch")
    admin.listed = pb.ListRequestsResponse(workers_set_apart=[apart])

    assert (await invoke()).stdout.splitlines()[-1] == "Worker 10.0.0.1:50053 is not used: its epoch"
    (given,) = json.loads((await invoke("--json")).stdout)["workers_set_apart"]
    assert given == {"worker": "10.0.0.1:50053", "why": "its epoch"}


@pytest.mark.parametrize("args", [["--json"], ["-o", "json"]])
async def test_as_json_it_has_all_fields(args: list[str], admin: ScriptedAdmin) -> None:
    preemption = pb.Preemption(choice=pb.RETURN_RECOMPUTE, swap_estimate=Duration(seconds=2))
    admin.explanation = explanation(sequence("PREEMPTED", num_ahead=0, last_preemption=preemption))

    given = json.loads((await invoke("mine", *args)).stdout)

    assert (given["tenant"], given["age"], given["time_left"]) == ("search", 61.0, None)
    (one,) = given["sequences"]
    assert (one["state"], one["num_ahead"], one["predicted_start"]) == ("preempted", 0, None)
    assert one["last_preemption"] == {"choice": "recompute", "swap_seconds": 2.0, "recompute_seconds": 0.0}


async def test_a_request_may_be_named_by_its_key_or_its_prompt(admin: ScriptedAdmin) -> None:
    admin.explanation = explanation()

    await invoke("--key", KEY)
    await invoke("mine", "--prompt", "2")

    assert admin.requests == [
        pb.ExplainRequest(key=KEY),
        pb.ExplainRequest(name=pb.RequestName(request_id="mine", prompt=2)),
    ]


async def test_without_a_request_the_live_ones_are_listed(admin: ScriptedAdmin) -> None:
    line = pb.RequestSummary(
        key=KEY, tenant="[red]", priority=2, state=pb.SEQUENCE_STATE_QUEUED, age=Duration(seconds=600),
        num_prompt_tokens=1_200, num_generated_tokens=5, model="small",
    )  # fmt: skip
    admin.listed = pb.ListRequestsResponse(requests=[line], num_live=1_234)

    result = await invoke("--tenant", "[red]", "--limit", "7")

    assert result.exit_code == 0
    _, row, rest = result.stdout.splitlines()
    assert row.split() == ["queued", "10", "min", "2", "1,200", "5", "small", "[red]", KEY]
    assert rest == "1 of 1,234 live requests, the oldest"
    assert admin.requests == [pb.ListRequestsRequest(tenant="[red]", limit=7)]
    assert json.loads((await invoke("--json")).stdout)["requests"][0]["state"] == "queued"


async def test_a_request_that_is_not_live_is_one_line(admin: ScriptedAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(run, ["explain", "mine"]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: no such request is live; ")


def test_without_a_scheduler_it_says_how_to_reach_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "mine", "--admin", "127.0.0.1:1"]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: no connection to 127.0.0.1:1; ")
    assert "--admin" in line


async def test_what_answers_there_may_be_no_scheduler(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(run, ["explain", "mine", "--admin", address]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: no admin service of a scheduler at {address}; ")
    assert "--admin" in line


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["mine", "--key", KEY], "--key"),
        (["--key", KEY, "--tenant", "search"], "--tenant"),
        (["--key", KEY, "--prompt", "0"], "--prompt"),
        (["--prompt", "1"], "--prompt"),
        (["--tenant", "search", "--prompt", "1"], "--prompt"),
        (["mine", "--limit", "20"], "--limit"),
        (["--key", KEY, "--limit", "3"], "--limit"),
        (["mine", "--prompt", "5000000000"], "--prompt"),
        (["mine", "--prompt", "-1"], "--prompt"),
        (["--limit", "0"], "--limit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_options_that_would_be_ignored_are_misuse(
    args: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Invalid value for {option}" in line.replace("'", "")


@pytest.mark.parametrize("args", [["\udcff"], ["mine", "--tenant", "\udcff"], ["--key", "\udcff"]])
def test_a_name_that_is_no_text_is_one_line(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", *args]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": is not text in UTF-8")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_a_policy_without_debts_shows_none(policy: str, admin: ScriptedAdmin) -> None:
    admin.explanation = explanation(sequence("RUNNING"), policy=policy)

    lines = (await invoke("mine")).stdout.splitlines()

    assert "  tenant       search" in lines


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (NOTHING, "0 ms"),
        (Duration(nanos=999_400_000), "999 ms"),
        (Duration(seconds=1), "1 s"),
        (Duration(seconds=119), "119 s"),
        (Duration(seconds=7_100), "118 min"),
        (Duration(seconds=9_000), "2.5 h"),
    ],
)
async def test_times_have_a_few_digits(age: Duration, expected: str, admin: ScriptedAdmin) -> None:
    admin.explanation = explanation(age=age)

    assert (await invoke("mine")).stdout.startswith(f"The request arrived {expected} ago;")
