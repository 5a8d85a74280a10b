"""Features together: whatever is asked for at once and whatever happens meanwhile, a request's output has the bits that
it has alone.

Requests have all kinds of sampling, grammars, several sequences, beam searches, stop tokens, log-probabilities of
output and prompt. They share prefixes and few blocks, are computed in chunks and drafted, swapped or computed again,
and lose their worker and their scheduler.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, MixtralConfig

import dense_models
import latent_models
import llama_models
import transformers_models
from core_runner import CoreRunner, Served, submission
from drafters import knowing
from grammars import CASES, VOCAB, tiny_grammars
from interrupted_runner import InterruptedRunner
from large import large_but
from ordered_dots import order_dots
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from quire.worker.v1 import worker_pb2 as worker_v1
from quire_kernels.cpu.linear import MatrixFormat
from runner_driver import make_runner
from runner_instance import make_instance
from tiny_model import EOS

BLOCK, PLENTY = 8, 128
NUM_REQUESTS = 21
INTERPRETED = (0, 1, 3, 6)
"""Requests of the Triton kernels, the last one a search."""
_KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    {"temperature": 1.3, "min_p": 0.02, "typical_p": 0.9, "logit_bias": {5: 3.0, 6: -100.0}},
    {"temperature": 1.0, "min_tokens": 3, "stop": [5, 7, 11], "logprobs": 1},
    {"temperature": 1.0, "bad_words": [[9], [3, 20], [44]], "logprob_token_ids": [5, 90], "logprobs": 1},
]


@dataclass(frozen=True)
class Model:
    """A tiny model, and in which formats the compiled kernels compute it."""

    config: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


_INT8: dict[str, Any] = {"cache_dtype": torch.int8}
MODELS = {
    "float32": Model(llama_models.VARIANTS["llama"]),
    "a cache in 8 bits": Model(llama_models.VARIANTS["qwen3"], _INT8),
    "a window, a cache in 8 bits": Model(llama_models.VARIANTS["mistral-window"], _INT8),
    "windows and caps, w8a8": Model(dense_models.VARIANTS["gemma2"], {"weights": MatrixFormat.W8A8}),
    "latent attention, a cache in 8 bits": Model(latent_models.VARIANTS["deepseek-v3"], _INT8),
    "experts and a window, w4a8": Model(transformers_models.VARIANTS["mixtral"], {"weights": MatrixFormat.W4A8}),
    "bfloat16, int8": Model(dense_models.VARIANTS["gemma3"], {"weights": MatrixFormat.INT8, "dtype": torch.bfloat16}),
    "learned positions, w4a16": Model(dense_models.VARIANTS["gpt2"], {"weights": MatrixFormat.W4A16}),
}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "swap": {"preemption": "swap", "num_blocks": 18, "num_host_blocks": 64, "max_step_tokens": 19},
    "recompute": {"preemption": "recompute", "num_blocks": 18},
}


# Of tiny sizes, since without a GPU the Triton kernels are interpreted
_TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ON_DEVICE = {
    "latent attention, a cache in 8 bits": Model(
        lambda: DeepseekV3Config(**latent_models._V3 | _TINY | {"num_key_value_heads": 2}),
        _INT8,
    ),
    "experts and a window": Model(
        lambda: MixtralConfig(
            **transformers_models.COMMON, **_TINY, num_key_value_heads=1, num_local_experts=3, sliding_window=9
        )
    ),
}


def _requests(rng: random.Random) -> list[scheduler_v1.Submit]:
    shared = [rng.randrange(3, VOCAB) for _ in range(2 * BLOCK + 3)]
    made = []
    for place in range(NUM_REQUESTS):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 50]))]
        prompt = shared + own if place % 3 == 0 else own
        length, n = rng.choice([1, 30, 40]), rng.choice([1, 1, 2, 3])
        if place % 7 == 6:
            submit = submission(str(place), prompt, min(length, 12), n, logprobs=rng.choice([None, 1]))
            submit.beam_search.width, submit.beam_search.length_penalty = 3, 1.0
        else:
            submit = _sampled(str(place), prompt, length, n, dict(_KINDS[place % len(_KINDS)]), rng)
        made.append(submit)
    return made


def _sampled(
    key: str, prompt: list[int], length: int, n: int, kind: dict[str, Any], rng: random.Random
) -> scheduler_v1.Submit:
    """With a grammar, log-probabilities of the prompt and a search for stop strings now and then."""
    lists = {name: kind.pop(name, []) for name in ("stop", "bad_words", "logprob_token_ids")}
    bias = kind.pop("logit_bias", {})
    submit = submission(key, prompt, length, n, seed=rng.randrange(2**40), **kind)
    sampling = submit.sampling
    sampling.logit_bias.update(bias)
    sampling.min_tokens = min(sampling.min_tokens, length)
    submit.stop_token_ids.extend(lists["stop"])
    sampling.suppressed_token_ids.extend(lists["stop"])
    sampling.logprob_token_ids.extend(lists["logprob_token_ids"])
    sampling.bad_words.extend(worker_v1.TokenSequence(token_ids=word) for word in lists["bad_words"])
    if not lists["stop"] and not lists["bad_words"] and rng.random() < 0.3:
        sampling.grammar = CASES[rng.choice(list(CASES))].grammar
        submit.stop_token_ids.append(EOS)
    if rng.random() < 0.4:
        submit.result.prompt_logprobs.num_top_logprobs = rng.choice([0, 2])
    submit.has_stop_strings = rng.random() < 0.3
    submit.priority = rng.choice([0, 1])
    return submit


Outputs = dict[tuple[str, int], tuple[list[int], list[Any], float | None]]


def _outputs(served: dict[str, list[Served]]) -> Outputs:
    return {
        (key, index): (one.token_ids, one.logprobs, one.score)
        for key, sequences in served.items()
        for index, one in enumerate(sequences)
    }


def _alone(
    submits: list[scheduler_v1.Submit], make: Callable[..., Any]
) -> tuple[Outputs, dict[str, list[worker_v1.TokenLogprobs]]]:
    """Each sequence by itself, and each search; and the log-probabilities of prompts."""
    core_runner = CoreRunner(make_instance(make(num_blocks=PLENTY)), PLENTY)
    found: Outputs = {}
    prompts = {}
    for submit in submits:
        is_search = submit.HasField("beam_search")
        for index in range(1 if is_search else submit.n):
            one = scheduler_v1.Submit()
            one.CopyFrom(submit)
            if not is_search:
                one.n = 1
            core_runner.prompt_logprobs.clear()
            served = _outputs(core_runner.serve([one], {} if is_search else {one.key: index}))
            found |= {(key, index + place): output for (key, place), output in served.items()}
            if index == 0:
                prompts[submit.key] = core_runner.prompt_logprobs[submit.key]
    return found, prompts


@pytest.mark.parametrize("circumstances", CIRCUMSTANCES)
@pytest.mark.parametrize("name", MODELS)
def test_all_at_once_has_the_bits_of_each_alone(
    name: str, circumstances: str, save_model: Callable[..., Path], reference: Callable[..., list[list[int]]]
) -> None:
    config = MODELS[name].config()
    config.vocab_size = VOCAB
    directory, rng = save_model(config), random.Random(name)

    def make(**options: Any) -> Any:
        return make_runner(
            directory, "compiled", block_size=BLOCK, grammars=tiny_grammars(), **MODELS[name].options, **options
        )

    submits = _requests(rng)
    expected, of_prompts = _alone(submits, make)
    if not MODELS[name].options:
        _check_greedy(submits, expected, directory, reference)
    prompts = {submit.key: list(submit.prompt_token_ids) for submit in submits}
    texts = [[*prompts[key], *tokens] for (key, _), (tokens, _, _) in expected.items()]
    options = dict(CIRCUMSTANCES[circumstances])
    preemption = options.pop("preemption")
    num_results = Counter[int]()
    for share in (0.0, 0.05):
        runner = make(make_drafter=knowing(texts, VOCAB, 1), max_draft_tokens=4, **options)
        core_runner = InterruptedRunner(make_instance(runner), options["num_blocks"], preemption, rng, share)
        assert _outputs(core_runner.serve(submits)) == expected
        assert core_runner.prompt_logprobs | of_prompts == of_prompts
        num_results += core_runner.num_results
        assert bool(core_runner.interruptions) == (share > 0)
        assert share or core_runner.core.totals.preemptions
    assert sum(num_results[count] for count in range(2, 6)) > 5


@pytest.mark.parametrize("name", large_but(ON_DEVICE, "experts and a window"))
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of suppressed logits, whose weights are 0
def test_all_at_once_has_the_bits_of_each_alone_by_the_triton_kernels(
    name: str,
    save_model: Callable[..., Path],
    reference: Callable[..., list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order_dots(monkeypatch)
    config = ON_DEVICE[name].config()
    config.vocab_size = VOCAB
    directory, rng = save_model(config), random.Random(name)

    def make(**options: Any) -> Any:
        return make_runner(
            directory,
            "triton",
            device="cuda" if torch.cuda.is_available() else "cpu",
            block_size=BLOCK,
            max_sequences=4,
            grammars=tiny_grammars(),
            deterministic=True,
            **ON_DEVICE[name].options,
            **options,
        )

    submits = [_shortened(submit) for submit in itemgetter(*INTERPRETED)(_requests(rng))]
    expected, of_prompts = _alone(submits, make)
    if not ON_DEVICE[name].options:
        _check_greedy(submits, expected, directory, reference)
    prompts = {submit.key: list(submit.prompt_token_ids) for submit in submits}
    texts = [[*prompts[key], *tokens] for (key, _), (tokens, _, _) in expected.items()]
    options: dict[str, Any] = {"num_blocks": 7, "num_host_blocks": 32, "max_step_tokens": 19, "cuda_graphs": True}
    runner = make(make_drafter=knowing(texts, VOCAB, 1), **options)
    core_runner = InterruptedRunner(make_instance(runner), 7, "swap", rng, 0.2)
    assert _outputs(core_runner.serve(submits)) == expected
    assert core_runner.prompt_logprobs | of_prompts == of_prompts
    assert core_runner.interruptions
    assert sum(core_runner.num_results[count] for count in range(2, 6))


def _shortened(submit: scheduler_v1.Submit) -> scheduler_v1.Submit:
    del submit.prompt_token_ids[17:]
    submit.max_tokens = min(submit.max_tokens, 4)
    submit.n = min(submit.n, 2)
    submit.sampling.min_tokens = min(submit.sampling.min_tokens, submit.max_tokens)
    return submit


def _check_greedy(
    submits: list[scheduler_v1.Submit], expected: Outputs, directory: Path, reference: Callable[..., list[list[int]]]
) -> None:
    """The tokens of greedy requests are those of transformers."""
    greedy = [
        submit
        for submit in submits
        if not (submit.sampling.temperature or submit.sampling.grammar or submit.HasField("beam_search"))
    ]
    assert greedy
    for submit in greedy:
        (tokens,) = reference(directory, [list(submit.prompt_token_ids)], submit.max_tokens)
        assert [expected[submit.key, index][0] for index in range(submit.n)] == [tokens] * submit.n
