"""The sequences that are returned."""

import math

from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.output import Chunk, Finish, FinishReason, TokenLogprob
from gateway_svc.ranking import completed_sequences
from gateway_svc.validated_request import BeamSearchParams, EarlyStopping
from gateway_values import make_generation, make_rendering
from quire.scheduler.v1.scheduler_pb2 import RenderOptions

END = Finish(FinishReason.STOP, 2)


def sequence(index: int, *logprobs: float, score: float | None = None) -> Chunk:
    """A finished sequence with these log-probabilities, each with two other top tokens."""
    drawn = [TokenLogprob(5, logprob, ((5, logprob), (6, -3.0)), 0) for logprob in logprobs]
    return Chunk(index, 0, f"text {index}", [5] * len(logprobs), drawn, END, score)


def test_the_best_go_out_best_first_and_are_numbered_anew() -> None:
    sequences = [sequence(0, -2.0), sequence(1, -0.5), sequence(2, -3.0), sequence(3, -1.0)]
    chosen = completed_sequences(sequences, make_rendering(n=2, best_of=4))
    assert [(one.index, one.text, one.score) for one in chosen] == [(0, "text 1", -0.5), (1, "text 3", -1.0)]


def test_what_counts_is_the_mean_per_token_not_the_sum() -> None:
    long, short = sequence(0, -0.5, -0.5, -0.5), sequence(1, -1.0)
    (best,) = completed_sequences([long, short], make_rendering(best_of=2))
    assert best.text == "text 0"


def test_of_equal_ones_the_first_goes_out() -> None:
    (best,) = completed_sequences([sequence(0, -1.0), sequence(1, -1.0)], make_rendering(best_of=2))
    assert best.text == "text 0"


def test_pieces_of_a_sequence_are_ranked_as_one() -> None:
    pieces = [sequence(0, -0.1), sequence(1, -1.0), Chunk(0, 1, "!", [5], [TokenLogprob(5, -9.0, (), 6)], END)]
    (best,) = completed_sequences(pieces, make_rendering(best_of=2))
    assert best.text == "text 1"


def test_sequences_keep_their_order_without_best_of() -> None:
    sequences = [sequence(0, -2.0), sequence(1, -1.0)]
    assert completed_sequences(sequences, make_rendering(n=2, logprobs=2)) == sequences


def test_log_probabilities_that_only_ranking_needed_do_not_go_out() -> None:
    sampling = make_generation(best_of=2).to_proto(RenderOptions()).sampling
    assert sampling.HasField("logprobs")
    assert sampling.logprobs == 0
    (best,) = completed_sequences([sequence(0, -1.0), sequence(1, -2.0)], make_rendering(best_of=2))
    assert best.logprobs == []


def test_requested_log_probabilities_are_kept() -> None:
    (best,) = completed_sequences([sequence(0, -1.0), sequence(1, -2.0)], make_rendering(best_of=2, logprobs=1))
    assert best.logprobs == sequence(0, -1.0).logprobs


def test_beams_come_ranked() -> None:
    search = BeamSearchParams(3, 1.0, EarlyStopping.HEURISTIC)
    beams = [sequence(0, -9.0, score=-0.25), sequence(1, -1.0, score=-0.5)]
    assert completed_sequences(beams, make_rendering(n=2, beam_search=search, logprobs=1)) == beams


logprobs = st.lists(st.floats(-20, 0), min_size=1, max_size=5)


@given(st.lists(logprobs, min_size=2, max_size=6), st.data())
def test_none_that_is_left_out_is_better_than_one_that_goes_out(drawn: list[list[float]], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(drawn) - 1))
    sequences = [sequence(index, *one) for index, one in enumerate(drawn)]
    chosen = completed_sequences(sequences, make_rendering(n=n, best_of=len(drawn)))
    scores = [one.score if one.score is not None else math.nan for one in chosen]
    means = sorted((sum(one) / len(one) for one in drawn), reverse=True)
    assert scores == means[:n]
