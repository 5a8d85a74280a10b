"""Which of a request's sequences go out, and in which order."""

from collections.abc import Sequence
from dataclasses import replace

from gateway_svc.output import Chunk, merge_chunks
from gateway_svc.rendering import Rendering


def completed_sequences(chunks: Sequence[Chunk], rendering: Rendering) -> list[Chunk]:
    """The whole sequences that go out, from all chunks of a request that has ended; indices are places in the answer.

    Of all sequences the n with the highest mean log-probability per token, the best one first, as the OpenAI API
    defines it; of equal ones the one of the lower index. What was drawn counts, under the model's own distribution,
    the token that ended the sequence included.
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
