"""Ranks the sequences of best_of and beam search."""

from collections.abc import Sequence
from dataclasses import replace

from gateway_svc.output import Chunk, merge_chunks
from gateway_svc.rendering import Rendering


def completed_sequences(chunks: Sequence[Chunk], rendering: Rendering) -> list[Chunk]:
    """The whole sequences to send, from all chunks of a request that has ended. Their indices are ranks.

    These are the n sequences with the highest mean log-probability per token, as the OpenAI API defines it; of equal
    ones the one with the lower index is first. Log-probabilities are those of the sampled tokens under the model's own
    distribution, including the token that ended the sequence.
    """
    whole = merge_chunks(chunks)
    if not rendering.is_best_of:
        return whole
    ranked = sorted(((_mean_logprob(chunk), chunk) for chunk in whole), key=lambda pair: pair[0], reverse=True)
    best = [replace(chunk, index=index, score=score) for index, (score, chunk) in enumerate(ranked[: rendering.n])]
    if rendering.logprobs is not None:
        return best
    return [replace(chunk, logprobs=[]) for chunk in best]


def _mean_logprob(chunk: Chunk) -> float:
    return sum(logprob.logprob for logprob in chunk.logprobs) / len(chunk.logprobs)
