"""With steps on a thread of their own, the next step may be launched before a token is known."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

import compiled
from worker_svc.batch import Batch, SequenceChunk, make_batch
from worker_svc.compiled_sampler import CompiledSampler
from worker_svc.executor import HostExecutor
from worker_svc.host_thread import HostThreadExecutor
from worker_svc.sampler import SamplerOutput, sample_tokens
from worker_svc.sequences import Sequence
from worker_svc.step import NewSequence, SamplingParams

VOCAB = 5


class Successor:
    """A model whose argmax is the last token plus 1; after token 4 its logits are NaN, and token 99 raises."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def __call__(self, batch: Batch) -> torch.Tensor:
        assert self.let_go.wait(30)
        if 99 in batch.token_ids:
            raise RuntimeError("broken")
        last = torch.from_numpy(batch.token_ids[batch.logits_indices])
        logits = torch.nn.functional.one_hot((last + 1) % VOCAB, VOCAB).float()
        logits[last == 4] = float("nan")
        return logits


class ArgmaxFinder:
    """A model that finds the argmax itself, and makes other logits than those that are needed NaN."""

    def __init__(self) -> None:
        self.needs_logits: list[list[bool]] = []
        self._argmax = np.empty(0, np.int64)

    def __call__(self, batch: Batch) -> torch.Tensor:
        assert batch.needs_logits is not None
        self.needs_logits.append(batch.needs_logits.tolist())
        if len(batch.context_lens) > 4:
            raise MemoryError
        logits = torch.cos(torch.arange(VOCAB) * torch.from_numpy(1.0 + batch.token_ids[batch.logits_indices])[:, None])
        self._argmax = logits.argmax(-1).numpy()
        logits[torch.from_numpy(~batch.needs_logits)] = float("nan")
        return logits.float()

    def argmax(self, _: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._argmax.copy()


def _batch(*tokens: int) -> Batch:
    chunks = [SequenceChunk(np.array([token], np.int32), 0, np.zeros(1, np.int32), 0, True) for token in tokens]
    return make_batch(chunks, 8)


def _sequences(count: int) -> list[Sequence]:
    return [Sequence(NewSequence(place, [0], 1, 0, SamplingParams())) for place in range(count)]


def test_placeholders_become_the_tokens_of_the_launch_before() -> None:
    model, sequences = Successor(), _sequences(3)
    executor = HostThreadExecutor(model, sample_tokens)
    first = executor.launch(_batch(0, 1, 2), sequences)
    second = executor.launch(_batch(first.placeholder_tokens[2], 3, first.placeholder_tokens[0]), sequences)
    assert not first.is_done()
    model.let_go.set()
    second.wait()
    assert second.is_done()
    assert first.result().tokens == [1, 2, 3]
    assert second.result().tokens == [4, 4, 2]


def test_a_row_without_a_token_does_not_affect_others() -> None:
    model, sequences = Successor(), _sequences(2)
    model.let_go.set()
    executor = HostThreadExecutor(model, sample_tokens)
    first = executor.launch(_batch(4, 0), sequences)
    second = executor.launch(_batch(*first.placeholder_tokens), sequences)
    assert first.result() == SamplerOutput([None, 1], [None, None])
    assert second.result().tokens[1] == 2


def test_the_result_raises_the_error_of_its_step_and_the_next_step_runs() -> None:
    model, sequences = Successor(), _sequences(1)
    model.let_go.set()
    executor = HostThreadExecutor(model, sample_tokens)
    broken = executor.launch(_batch(99), sequences)
    fine = executor.launch(_batch(1), sequences)
    broken.wait()
    with pytest.raises(RuntimeError, match="broken"):
        broken.result()
    assert fine.result().tokens == [2]


def test_other_work_is_done_between_the_steps_that_it_was_asked_for_between() -> None:
    model, sequences = Successor(), _sequences(1)
    executor = HostThreadExecutor(model, sample_tokens)
    seen: list[bool] = []
    first = executor.launch(_batch(0), sequences)
    between = executor.submit(lambda: seen.append(first.is_done()))
    second = executor.launch(_batch(1), sequences)
    assert not between.done()
    model.let_go.set()
    second.wait()
    assert between.done()
    assert seen == [True]


GREEDY = SamplingParams()
PLANS = {
    "greedy": ([GREEDY, GREEDY], [], [[False, False]]),
    "one samples": ([GREEDY, SamplingParams(temperature=1.0, seed=3)], [], [[False, True]]),
    # Of four rows of its draft the first two are before the least number of tokens.
    "a draft crosses min_tokens": (
        [SamplingParams(min_tokens=2, suppressed_token_ids=(0,)), GREEDY],
        [[1, 2, 3], []],
        [[True, True, False, False, False]],
    ),
    "memory runs out": (
        [GREEDY, SamplingParams(logprobs=1), GREEDY, SamplingParams(temperature=1.0, seed=3), GREEDY],
        [],
        [[False, True, False, True, False], [False, True, False, True]],
    ),
    "nothing samples": ([], [], [[]]),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_forward_pass_that_finds_the_argmax_returns_the_logits_that_are_needed(plan: str) -> None:
    params, drafts, needed = PLANS[plan]
    sequences = [Sequence(NewSequence(place, [place], 1, 0, each)) for place, each in enumerate(params)]
    block = np.zeros(1, np.int32)
    chunks = [
        SequenceChunk(np.array([place, *draft], np.int32), 0, block, 0, True, len(draft))
        for place, draft in enumerate(drafts or [[] for _ in params])
    ] or [SequenceChunk(np.array([1], np.int32), 0, block, 0, False)]
    batch = make_batch(chunks, 8, range(len(chunks)))
    model, pool = ArgmaxFinder(), compiled.thread_pool()
    sampler = CompiledSampler(pool, model.argmax)
    found = HostThreadExecutor(model, sampler, forward_finds_argmax=True).launch(batch, sequences, drafts).result()
    assert model.needs_logits == needed
    if plan == "memory runs out":
        assert (found.tokens.pop(), found.logprobs.pop(), found.left_out) == (None, None, [4])
        chunks, sequences = chunks[:4], sequences[:4]
    sequences = [
        Sequence(NewSequence(place, [place], 1, 0, each)) for place, each in enumerate(params[: len(sequences)])
    ]

    def whole(batch: Batch) -> torch.Tensor:
        return model(replace(batch, needs_logits=np.ones(len(batch.logits_indices), bool)))

    executor = HostExecutor(whole, CompiledSampler(pool))
    expected = executor.launch(make_batch(chunks, 8), sequences, drafts).result()
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
