"""With steps on a thread of their own, the next step may be launched before a token is known."""

import threading

import numpy as np
import pytest
import torch

from worker_svc.batch import Batch, SequenceChunk, make_batch
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
