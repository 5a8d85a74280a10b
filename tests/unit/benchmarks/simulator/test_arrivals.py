"""Arrival processes: at recorded times, or one request after another."""

from benchmarks.simulator.arrivals import Arrival, ClosedLoop, OpenLoop, merged


def arrival(at: float, prompt_tokens: int = 1) -> Arrival:
    return Arrival(at, prompt_tokens, 1, 1)


def test_an_open_loop_gives_one_request_ahead() -> None:
    traffic = OpenLoop([arrival(1), arrival(2)])
    assert list(traffic.first()) == [arrival(1)]
    assert traffic.after_end(5.0) is None
    assert traffic.after_arrival() == arrival(2)
    assert traffic.after_arrival() is None


def test_an_open_loop_may_be_empty() -> None:
    assert list(OpenLoop([]).first()) == []


def test_clients_of_a_closed_loop_wait_for_an_end_and_think() -> None:
    traffic = ClosedLoop([arrival(7, number) for number in (1, 2, 3)], num_clients=2, think_seconds=0.5)
    assert list(traffic.first()) == [arrival(0, 1), arrival(0, 2)]
    assert traffic.after_arrival() is None
    assert traffic.after_end(4.0) == arrival(4.5, 3)
    assert traffic.after_end(5.0) is None


def test_streams_merge_by_time() -> None:
    assert [one.at for one in merged([arrival(1), arrival(4)], [arrival(2), arrival(3)])] == [1, 2, 3, 4]
