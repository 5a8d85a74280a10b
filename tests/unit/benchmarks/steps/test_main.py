"""A case from end to end: scheduler and worker in processes of their own, and a session with the scheduler."""

from benchmarks.steps import exchange
from benchmarks.steps.__main__ import measure


def test_sequences_decode_together_and_every_part_is_timed() -> None:
    case = measure(num_sequences=3, forward_ms=1.0, num_steps=5)
    assert (case.num_sequences, case.num_steps) == (3, 5)
    spreads = (case.schedule, case.commit, case.schedule_and_commit, case.send, case.round_trip)
    assert all(0 < spread.p50 <= spread.p99 for spread in spreads)
    assert 0 <= case.idle_share < 1


def test_a_message_goes_there_and_back_whichever_thread_reads_the_sockets() -> None:
    for polling in exchange.POLLING:
        measured = exchange.measure_exchange(polling, num_messages=5)
        assert 0 < measured.round_trip < 1e3
        assert 0 < measured.processor < 1e3
