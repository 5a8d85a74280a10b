"""Too few blocks, in float32: every request is preempted, and every token equals that of transformers, after a swap and
after recomputation.

The core and the runner share one process, so the tests can count the preemptions of each request.
"""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from beams import BeamJudge, Search
from benchmarks.serving.loads import PREFIX_WORDS, shared_prefix_requests
from core_runner import CoreRunner, Durations, Served, num_blocks_for, submission
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from reference import MAX_TIES, NEW_TOKENS, Reference
from scheduler_svc.core.request import PreemptionMethod, PreemptionRecord
from svc_common.settings import read_settings
from worker_svc.instance import ModelInstance, load_instance
from worker_svc.settings import WorkerSettings

PLENTY, SCARCE = 512, 20  # blocks
MAX_ROUNDS = 4
BLOCK = 16
# To copy a block of 16 tokens takes an eighth of the time to compute it, or eight times as long.
FAST_SWAPS, SLOW_SWAPS = Durations(0.01, 0.02), Durations(0.01, 1.28)
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7}
EARLY_STOPPINGS = {
    False: scheduler_v1.EARLY_STOPPING_HEURISTIC,
    True: scheduler_v1.EARLY_STOPPING_AT_WIDTH,
    "never": scheduler_v1.EARLY_STOPPING_NEVER,
}


@pytest.fixture(scope="module")
def worker(shallow_model: Path) -> ModelInstance:
    flags = ["--device=cpu", "--dtype=float32", "--kernels=compiled", f"--num-blocks={PLENTY}", "--swap-space=0.2"]
    return load_instance(read_settings(WorkerSettings, flags), lambda line: None)


@pytest.fixture(scope="module")
def judge(shallow_model: Path) -> BeamJudge:
    return BeamJudge(shallow_model)


def serve_until_all_preempted(
    worker: ModelInstance, shallow_judged: list[Reference], preemption: str, durations: Durations | None = None
) -> list[Served]:
    """Serves eight prompts of 1 to 33 tokens at once until each has been preempted; returns each in its preempted run.

    Prompts that were not preempted come first in the next round, which makes them the first victims. Raises
    AssertionError for a wrong token.
    """
    order, preempted = shallow_judged[:16:2], dict[Reference, Served]()
    for _ in range(MAX_ROUNDS):
        runner = CoreRunner(worker, SCARCE, preemption, durations=durations)
        answers = runner.serve(submission(str(i), r.prompt, NEW_TOKENS) for i, r in enumerate(order))
        served = [answers[str(i)][0] for i in range(len(order))]
        assert sum(r.judge(one.token_ids) for r, one in zip(order, served, strict=True)) <= MAX_TIES
        preempted |= {r: one for r, one in zip(order, served, strict=True) if one.num_preemptions}
        if len(preempted) == len(order):
            return list(preempted.values())
        order.sort(key=preempted.__contains__)
    raise AssertionError(f"{len(order) - len(preempted)} requests were never preempted")


def last_preemptions(served: list[Served]) -> list[PreemptionRecord]:
    """The last preemption of each sequence."""
    return [one.sequence.last_preemption for one in served if one.sequence.last_preemption is not None]


def test_every_request_is_swapped(worker: ModelInstance, shallow_judged: list[Reference]) -> None:
    served = serve_until_all_preempted(worker, shallow_judged, "swap")
    assert {one.method for one in last_preemptions(served)} == {PreemptionMethod.SWAP}
    assert all(one.num_returns for one in served)


def test_every_request_is_computed_again(worker: ModelInstance, shallow_judged: list[Reference]) -> None:
    served = serve_until_all_preempted(worker, shallow_judged, "recompute")
    assert {one.method for one in last_preemptions(served)} == {PreemptionMethod.RECOMPUTE}
    assert not any(one.num_returns for one in served)


@pytest.mark.parametrize(
    ("durations", "method"),
    [(FAST_SWAPS, PreemptionMethod.SWAP), (SLOW_SWAPS, PreemptionMethod.RECOMPUTE)],
    ids=["fast", "slow"],
)
def test_every_request_is_resumed_by_the_cheaper_method(
    worker: ModelInstance, shallow_judged: list[Reference], durations: Durations, method: PreemptionMethod
) -> None:
    served = serve_until_all_preempted(worker, shallow_judged, "auto", durations)
    assert len(last_preemptions(served)) == len(served)
    for one in last_preemptions(served):
        assert one.method is method
        assert (one.swap_seconds <= one.recompute_seconds) == (method is PreemptionMethod.SWAP)


@pytest.mark.parametrize("num_blocks", [PLENTY, SCARCE], ids=["plenty", "scarce"])
def test_sequences_of_one_request_are_those_of_lone_requests(
    worker: ModelInstance, shallow_judged: list[Reference], num_blocks: int
) -> None:
    prompt = shallow_judged[14].prompt  # of 33 tokens: two full blocks and a partial one
    lone = []
    for index in range(4):
        alone = CoreRunner(worker, PLENTY)
        lone += alone.serve([submission("lone", prompt, 48, logprobs=3, **DRAWN)], {"lone": index})["lone"]
    assert len({tuple(one.token_ids) for one in lone}) == 4
    runner = CoreRunner(worker, num_blocks, "swap")
    company = [submission(f"company {i}", shallow_judged[i].prompt, NEW_TOKENS) for i in (11, 13)]
    together = runner.serve([submission("four", prompt, 48, n=4, logprobs=3, **DRAWN), *company])["four"]
    assert [one.token_ids for one in together] == [one.token_ids for one in lone]
    assert [one.logprobs for one in together] == [one.logprobs for one in lone], "to the last bit"
    assert runner.num_copies == 3
    assert any(one.num_preemptions for one in together) == (num_blocks == SCARCE)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_beams_that_give_way_are_transformers_beams(
    worker: ModelInstance, judge: BeamJudge, shallow_judged: list[Reference], preemption: str
) -> None:
    searches = [
        Search(shallow_judged[14].prompt, 4, 4, 1.0, False),
        Search(shallow_judged[22].prompt, 3, 2, 0.0, True),
        Search(shallow_judged[8].prompt, 4, 1, 2.0, "never"),
    ]
    runner = CoreRunner(worker, 16, preemption)
    served = runner.serve(_submission(str(i), search, judge.eos_token_id) for i, search in enumerate(searches))
    for i, search in enumerate(searches):
        found = judge.search(search)
        assert [tuple(one.token_ids) for one in served[str(i)]] == [one.token_ids for one in found]
        assert [one.score for one in served[str(i)]] == pytest.approx([one.score for one in found], rel=1e-4)
    assert runner.core.totals.preemptions >= 1
    assert runner.core.totals.swaps == (runner.core.totals.preemptions if preemption == "swap" else 0)


def _submission(key: str, search: Search, eos_token_id: int) -> scheduler_v1.Submit:
    submit = submission(key, search.prompt, search.max_tokens, search.n)
    submit.stop_token_ids.append(eos_token_id)
    submit.beam_search.width = search.width
    submit.beam_search.length_penalty = search.length_penalty
    submit.beam_search.early_stopping = EARLY_STOPPINGS[search.early_stopping]
    return submit


def test_prefix_of_48_requests_is_computed_and_kept_once(worker: ModelInstance, shallow_model: Path) -> None:
    requests = shared_prefix_requests(Tokenizer.from_file(str(shallow_model / "tokenizer.json")), 48)
    prompts = [request.prompt_token_ids for request in requests]
    num_shared = next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    assert num_shared >= PREFIX_WORDS
    num_tokens = 2 * BLOCK + 1
    runner = CoreRunner(worker, PLENTY)
    runner.serve(submission(str(i), prompt, num_tokens) for i, prompt in enumerate(prompts))
    in_full_blocks = num_shared // BLOCK * BLOCK
    # The last sampled token is not computed.
    own = [len(prompt) - in_full_blocks + num_tokens - 1 for prompt in prompts]
    assert runner.core.totals.computed_tokens == in_full_blocks + sum(own)
    tails = [num_blocks_for(len(prompt) - num_shared + num_tokens, BLOCK) for prompt in prompts]
    assert runner.peak_blocks == pytest.approx(num_blocks_for(num_shared, BLOCK) + sum(tails), rel=0.05)


def test_prompt_of_four_sequences_is_computed_and_kept_once(
    worker: ModelInstance, shallow_judged: list[Reference]
) -> None:
    prompt = shallow_judged[28].prompt
    num_full, rest = divmod(len(prompt), BLOCK)
    assert rest == 1
    runner = CoreRunner(worker, PLENTY)
    runner.serve([submission("four", prompt, NEW_TOKENS - 1, n=4, **DRAWN)])
    # Each sequence computes the last prompt token itself and samples from it.
    assert runner.core.totals.computed_tokens == len(prompt) + 3 + 4 * (NEW_TOKENS - 2)
    tails = 4 * num_blocks_for(rest + NEW_TOKENS - 1, BLOCK)
    assert runner.peak_blocks == pytest.approx(num_full + tails, rel=0.05)
