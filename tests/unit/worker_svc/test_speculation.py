"""With a drafter every token and log-probability equals that without one, through preemption, swap and cancellation."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from core_runner import CoreRunner, Served, submission
from drafters import knowing
from llama_models import VARIANTS, VOCAB
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import make_runner
from runner_instance import make_instance
from transformers_models import VARIANTS as OTHERS
from worker_svc.drafters.ngram import NgramDrafter

BLOCK, PLENTY = 8, 256
MAX_DRAFT_TOKENS = 5
_KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    {"repetition_penalty": 1.2, "frequency_penalty": 1.0, "logprobs": 2},
    {"temperature": 1.3, "min_p": 0.02, "min_tokens": 9, "logit_bias": {5: 3.0, 6: -100.0}, "stop": [5, 7, 11]},
    {"stop": [3, 20, 21, 40, 41, 60], "min_tokens": 2, "logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": [3, 9, 20, 44], "bad_words": [[9], [3, 20], [20, 20, 3]]},
    {"bad_words": [[3, 3], [20, 9, 3], [44]], "logprobs": 1, "logprob_token_ids": [5, 90]},
]


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: list[int]
    max_tokens: int
    n: int = 1
    kind: dict[str, Any] = field(default_factory=dict)

    def submit(self, key: str, *, n: int | None = None) -> scheduler_v1.Submit:
        options = dict(self.kind)
        logit_bias, stop = options.pop("logit_bias", {}), options.pop("stop", [])
        bad_words = options.pop("bad_words", [])
        named = {name: options.pop(name, []) for name in ("allowed_token_ids", "logprob_token_ids")}
        submit = submission(key, self.prompt, self.max_tokens, n or self.n, **options)
        submit.sampling.logit_bias.update(logit_bias)
        submit.stop_token_ids.extend(stop)
        submit.sampling.allowed_token_ids.extend(named["allowed_token_ids"])
        submit.sampling.logprob_token_ids.extend(named["logprob_token_ids"])
        submit.sampling.bad_words.extend(worker_v1.TokenSequence(token_ids=word) for word in bad_words)
        if submit.sampling.min_tokens:
            submit.sampling.suppressed_token_ids.extend(stop)
        return submit


def _requests(seed: int, count: int) -> list[Asked]:
    """Prompts of all lengths around those of blocks, a third of which share a prefix, with all kinds of sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(2 * BLOCK + 3)]
    made = []
    for place in range(count):
        length = rng.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 50])
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        kind = _KINDS[place % len(_KINDS)] | {"seed": rng.randrange(2**40)}
        prompt = shared + prompt if place % 3 == 0 else prompt
        made.append(Asked(prompt, rng.choice([1, 2, 7, 40, 60]), rng.choice([1, 1, 1, 3]), kind))
    return made


def _serve(asked: list[Asked], directory: Path, kernels: str, **options: Any) -> tuple[list[list[Served]], CoreRunner]:
    num_blocks = options.pop("num_blocks", PLENTY)
    preemption = options.pop("preemption", "auto")
    runner = make_runner(
        directory, kernels, block_size=BLOCK, num_blocks=num_blocks, max_draft_tokens=MAX_DRAFT_TOKENS, **options
    )
    core_runner = CoreRunner(make_instance(runner), num_blocks, preemption)
    answers = core_runner.serve(one.submit(str(place)) for place, one in enumerate(asked))
    return [answers[str(place)] for place in range(len(asked))], core_runner


def _alone(asked: list[Asked], directory: Path, kernels: str) -> list[list[Served]]:
    """Each sequence by itself, one token per step."""
    core_runner = CoreRunner(make_instance(make_runner(directory, kernels, block_size=BLOCK, num_blocks=64)), 64)
    found: list[list[Served]] = []
    for one in asked:
        answers = [core_runner.serve([one.submit("lone", n=1)], {"lone": index})["lone"] for index in range(one.n)]
        found.append([served for (served,) in answers])
    assert set(core_runner.num_results) <= {0, 1}
    return found


@cache
def _lone(seed: int, directory: Path, kernels: str) -> list[list[Served]]:
    """Of 21 requests."""
    return _alone(_requests(seed, 21), directory, kernels)


def _texts(asked: list[Asked], found: list[list[Served]]) -> list[list[int]]:
    pairs = zip(asked, found, strict=True)
    return [[*one.prompt, *served.token_ids] for one, sequences in pairs for served in sequences]


def _check(served: list[list[Served]], expected: list[list[Served]], kernels: str) -> None:
    for ours, theirs in zip(served, expected, strict=True):
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            if kernels == "compiled":
                assert one.logprobs == other.logprobs, "to the last bit"
            else:
                assert [value for value, _ in one.logprobs] == pytest.approx(
                    [value for value, _ in other.logprobs], abs=1e-4
                )


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "plenty": {},
    "in chunks": {"max_step_tokens": 19},
    "few beside each other": {"max_sequences": 3},
    "swapped": {"num_blocks": 16, "preemption": "swap", "num_host_blocks": 64},
    "computed again": {"num_blocks": 16, "preemption": "recompute"},
}


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_a_drafter_changes_no_token(name: str, kernels: str, tiny_llama: Path) -> None:
    num_preemptions, num_results = 0, Counter[int]()
    for seed in range(3):
        asked = _requests(seed, 21)
        expected = _lone(seed, tiny_llama, kernels)
        make_drafter = knowing(_texts(asked, expected), VOCAB, seed)
        served, core_runner = _serve(asked, tiny_llama, kernels, make_drafter=make_drafter, **CIRCUMSTANCES[name])
        _check(served, expected, kernels)
        assert core_runner.core.totals.cache_hits > 0
        num_preemptions += core_runner.core.totals.preemptions
        num_results += core_runner.num_results
    assert all(num_results[count] for count in range(1, MAX_DRAFT_TOKENS + 2)), num_results
    assert (num_preemptions > 5) == ("preemption" in CIRCUMSTANCES[name])


@pytest.mark.parametrize(
    ("config", "kernels"),
    [
        (VARIANTS["mistral-window"], "compiled"),
        (VARIANTS["qwen3"], "triton"),
        (OTHERS["phi"], "compiled"),
        (OTHERS["phi"], "torch"),
        pytest.param(OTHERS["phi"], "triton", marks=pytest.mark.large),
    ],
    ids=["window", "triton", "transformers-compiled", "transformers-torch", "transformers-triton"],
)
def test_every_backend_verifies(config: Callable[[], Any], kernels: str, save_model: Callable[..., Path]) -> None:
    directory = save_model(config())
    # The interpreter of Triton's kernels is slow.
    num_requests, num_tokens, num_drafted = (4, 7, 1) if kernels == "triton" else (7, 12, 5)
    asked = [Asked(one.prompt, num_tokens, 1, one.kind) for one in _requests(7, num_requests)]
    expected = _alone(asked, directory, kernels)
    make_drafter = knowing(_texts(asked, expected), VOCAB, 7)
    graphs = {"cuda_graphs": True} if kernels == "triton" else {}
    served, core_runner = _serve(asked, directory, kernels, make_drafter=make_drafter, **graphs)
    for (ours,), (theirs,) in zip(served, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
    assert sum(core_runner.num_results[count] for count in range(2, MAX_DRAFT_TOKENS + 2)) > num_drafted


@pytest.mark.parametrize("weights", MatrixFormat)
def test_the_bits_are_the_same_in_other_arithmetic(weights: MatrixFormat, tiny_llama: Path) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "weights": weights}
    asked = [Asked(one.prompt, 24, 1, one.kind | {"logprobs": 3}) for one in _requests(8, 14)]
    expected, _ = _serve(asked, tiny_llama, "compiled", **options)
    make_drafter = knowing(_texts(asked, expected), VOCAB, 8)
    served, _ = _serve(asked, tiny_llama, "compiled", make_drafter=make_drafter, **options)
    _check(served, expected, "compiled")


def test_what_is_drafted_wrongly_is_never_returned(tiny_llama: Path) -> None:
    asked = [one for one in _requests(5, 21) if one.n == 1]
    expected = _alone(asked, tiny_llama, "compiled")
    texts = _texts(asked, expected)

    class Wrong:
        def draft(self, tokens: Any, max_tokens: int) -> list[int]:
            (text,) = [text for text in texts if text[: len(tokens)] == tokens.tolist()][:1] or [[]]
            return [(token + 1) % VOCAB for token in text[len(tokens) : len(tokens) + max_tokens]]

    served, core_runner = _serve(asked, tiny_llama, "compiled", make_drafter=Wrong)
    _check(served, expected, "compiled")
    assert set(core_runner.num_results) <= {0, 1}


def test_a_repetitive_stream_takes_fewer_steps_than_tokens(tiny_llama: Path) -> None:
    asked = [Asked([8] * 10, 40, kind={"logit_bias": {8: 100.0}, "logprobs": 1})]
    expected = _alone(asked, tiny_llama, "compiled")
    served, core_runner = _serve(asked, tiny_llama, "compiled", make_drafter=NgramDrafter)
    _check(served, expected, "compiled")
    assert sum(core_runner.num_results.values()) <= 20


def test_beams_are_not_drafted(tiny_llama: Path) -> None:
    prompt = [4] * 20
    answers = []
    for make_drafter in (None, NgramDrafter):
        runner = make_runner(tiny_llama, "compiled", block_size=BLOCK, num_blocks=PLENTY, make_drafter=make_drafter)
        core_runner = CoreRunner(make_instance(runner), PLENTY)
        submit = submission("search", prompt, 12, n=3)
        submit.beam_search.width = 3
        submit.beam_search.length_penalty = 1.0
        answers.append([(one.token_ids, one.score) for one in core_runner.serve([submit])["search"]])
        assert set(core_runner.num_results) <= {0, 1}
    assert answers[0] == answers[1]


class LeavingCore(CoreRunner):
    """Requests are cancelled, and sequences end by a stop string, while steps that name them are in flight."""

    rng = random.Random(0)

    def _step(self) -> None:
        super()._step()
        for key in list(self.core.keys):
            for sequence in self.core.sequences(key):
                if self.rng.random() < 0.02:
                    self.core.finish(key, sequence.index, self.rng.randint(0, sequence.num_output))
            if self.rng.random() < 0.02:
                self.core.cancel(key)


def test_the_end_of_a_sequence_does_not_affect_others(tiny_llama: Path) -> None:
    num_cut = 0
    for seed in range(4):
        asked = _requests(seed, 21)
        expected = _lone(seed, tiny_llama, "compiled")
        runner = make_runner(
            tiny_llama,
            "compiled",
            block_size=BLOCK,
            num_blocks=40,
            num_host_blocks=64,
            make_drafter=knowing(_texts(asked, expected), VOCAB, seed),
        )
        answers = LeavingCore(make_instance(runner), 40).serve(one.submit(str(i)) for i, one in enumerate(asked))
        for place, sequences in enumerate(expected):
            for served in answers[str(place)]:
                whole = sequences[served.sequence.index]
                assert served.token_ids == whole.token_ids[: len(served.token_ids)]
                assert served.logprobs == whole.logprobs[: len(served.logprobs)]
                num_cut += len(served.token_ids) < len(whole.token_ids)
    assert num_cut > 10
