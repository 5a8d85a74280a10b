"""With sampling on the host, tokens are known at once and are their own placeholders."""

import numpy as np
import torch

from worker_svc.batch import Batch, SequenceChunk, make_batch
from worker_svc.executor import HostExecutor
from worker_svc.sampler import SamplerOutput
from worker_svc.sequences import Sequence
from worker_svc.step import NewSequence, SamplingParams

VOCAB = 5


class Fixed:
    """A model with the same logits after every token; NaN after token 4."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        logits = torch.tensor([0.0, 1.0, 2.0, 1.5, 0.0]).repeat(len(batch.logits_indices), 1)
        logits[torch.from_numpy(batch.token_ids[batch.logits_indices] == 4)] = float("nan")
        return logits


def _sequence(token: int, params: SamplingParams) -> Sequence:
    return Sequence(NewSequence(0, [token], 1, 0, params))


def _batch(*sequences: Sequence) -> Batch:
    block = np.zeros(1, np.int32)
    return make_batch([SequenceChunk(sequence.tokens.values, 0, block, 0, True) for sequence in sequences], 8)


def test_tokens_stand_for_themselves() -> None:
    sequences = [_sequence(token, SamplingParams()) for token in (0, 4)]
    handle = HostExecutor(Fixed()).launch(_batch(*sequences), sequences)
    assert handle.is_done()
    assert handle.result() == SamplerOutput([2, None], [None, None])
    # What failed has to be looked up too, if the next step was launched already.
    assert handle.placeholder_tokens[0] == 2
    assert 0 <= handle.placeholder_tokens[1] < VOCAB


def test_each_sampled_token_depends_on_those_before_it() -> None:
    executor, sequence = HostExecutor(Fixed()), _sequence(0, SamplingParams(frequency_penalty=0.4))
    sampled = []
    for _ in range(4):
        handle = executor.launch(_batch(sequence), [sequence])
        sampled += handle.result().tokens
        sequence.append_placeholder(handle.placeholder_tokens[0])
    assert sampled == [2, 2, 3, 2]


def test_a_step_may_sample_nothing() -> None:
    chunk = SequenceChunk(np.array([1], np.int32), 0, np.zeros(1, np.int32), 0, False)
    handle = HostExecutor(Fixed()).launch(make_batch([chunk], 8), [])
    assert (handle.placeholder_tokens, handle.result()) == ([], SamplerOutput([], []))
