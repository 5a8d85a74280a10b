"""The modelled GPU takes for a kernel what its bytes, operations and instructions take."""

from dataclasses import replace

import pytest

from benchmarks.simulator.gpu_model.hardware import H100
from benchmarks.simulator.gpu_model.launches import Launch, StepTrace
from benchmarks.simulator.gpu_model.times import LLAMA_8B_HEADS, AttentionTimes, step_time


@pytest.fixture(scope="module")
def attention() -> AttentionTimes:
    return AttentionTimes(LLAMA_8B_HEADS, H100)


@pytest.mark.parametrize("contexts", [[8192] * 64, [1024] * 63 + [32768], [17] * 3, [4096]])
def test_no_decode_is_faster_than_its_keys_and_values_are_read(attention: AttentionTimes, contexts: list[int]) -> None:
    assert attention.decode(contexts) >= attention.kv_bytes(contexts) / H100.bytes_per_second


def test_equal_contexts_are_read_at_nearly_the_rate_of_copies(attention: AttentionTimes) -> None:
    contexts = [8192] * 64
    assert attention.kv_bytes(contexts) / attention.decode(contexts) > 0.9 * H100.bytes_per_second


def test_a_memory_of_half_the_rate_takes_twice_as_long() -> None:
    slow = replace(H100, bytes_per_second=H100.bytes_per_second / 2)
    contexts = [8192] * 64
    twice = 2 * AttentionTimes(LLAMA_8B_HEADS, H100).decode(contexts)
    assert AttentionTimes(LLAMA_8B_HEADS, slow).decode(contexts) == pytest.approx(twice)


def test_no_prefill_is_faster_than_its_products(attention: AttentionTimes) -> None:
    for lengths in ([(4096, 4096)], [(1024, 1024)] * 8, [(2048, 8192)], [(5, 5)]):
        operations = attention.prefill_operations(lengths)
        assert attention.prefill(lengths) > operations / H100.peak_operations_per_second


def test_operations_count_the_pairs_that_see_each_other(attention: AttentionTimes) -> None:
    assert attention.prefill_operations([(2, 5)]) == 4 * (4 + 5) * 32 * 128


def test_a_step_takes_the_larger_of_bytes_and_operations_and_a_pause_for_each_kernel(attention: AttentionTimes) -> None:
    launches = (Launch("linear", 3_000_000, 10), Launch("linear", 10, 10**12), Launch("_decode_kernel", 10**12))
    lengths = [(1, 100)] * 4
    time = step_time(StepTrace(launches, 2e-6, 1.0), lengths, attention, H100, in_graphs=True)
    expected = 3e6 / H100.bytes_per_second + 1e12 / H100.operations_per_second + attention.decode([100] * 4)
    assert time.kernels == pytest.approx(expected)
    assert time.pauses == pytest.approx(3 * H100.graph_launch_seconds)
    assert time.host == pytest.approx(2e-6 + 2 * H100.replay_seconds)
    assert time.seconds == pytest.approx(time.kernels + time.pauses)


def test_a_step_without_graphs_waits_for_the_host(attention: AttentionTimes) -> None:
    time = step_time(StepTrace((Launch("linear", 10),), 0.25, 0.5), [(1, 100)], attention, H100, in_graphs=False)
    assert time.seconds == pytest.approx(0.25 + 0.5 + H100.host_launch_seconds)


def test_measured_rates_replace_the_assumed_ones() -> None:
    measured = H100.with_rates({"memory": 2900.0, "matrix": 700.0, "link": 50.0})
    assert (measured.bytes_per_second, measured.operations_per_second) == (2.9e12, 7e14)
    assert "measured" in measured.origin
