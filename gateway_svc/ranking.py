"""Which of a request's sequences go out, and in which order."""

from collections.abc import Sequence
from dataclasses import replace

from gateway_svc.generation import Generation
from gateway_svc.output import Chunk, joined


def completed(chunks: Sequence[Chunk], generation: Generation) -> list[Chunk]:
    """The whole sequences that go out, from all chunks of a request that has ended; indices are places in the answer.

    Of best_of sequences the n with the highest mean log-probability per token, the best one first, as the OpenAI API
    defines it; of equal ones the one of the lower index. What was drawn counts, under the model's own distribution,
    the token that ended the sequence included.
    """
    whole = joined(chunks)
    if generation.is_ranked_here:
        ranked = sorted(((_mean_logprob(chunk), chunk) for chunk in whole), key=lambda pair: pair[0], reverse=True)
        best = ranked[: generation.n]
        whole = [replace(chunk, index=index, score=score) for index, (score, chunk) in enumerate(best)]
    if generation.is_ranked_here or generation.beam_search is not None:
        return [_with_logprobs_asked_for(chunk, generation.logprobs) for chunk in whole]
    return whole


def _mean_logprob(chunk: Chunk) -> float:
    return sum(logprob.logprob for logprob in chunk.logprobs) / len(chunk.logprobs)


def _with_logprobs_asked_for(chunk: Chunk, num_top: int | None) -> Chunk:
    """The chunk without the log-probabilities that only its ranking needed."""
    if num_top is None:
        return replace(chunk, logprobs=[])
    return replace(chunk, logprobs=[replace(one, top=one.top[:num_top]) for one in chunk.logprobs])
