"""A few prompts through `LLM` and a server; and what the comparison finds."""

import pytest

from benchmarks.deployment import prepare_model
from benchmarks.offline.runs import OfflineRun
from quire_client.bench.mix import sample_mix
from tests.acceptance.offline import OfflineOutcome, compare


@pytest.mark.usefixtures("shallow_model")
def test_the_class_has_the_tokens_of_the_server() -> None:
    outcome = compare(prepare_model(), sample_mix(5, 5, 40_000), num_streams=5, num_runs=1)
    assert outcome.different == set()


@pytest.mark.parametrize(
    ("offline", "errors"),
    [
        (OfflineRun(1.0, [[1, 2], [3, 4]]), []),
        (OfflineRun(1.0, [[1, 2], [3, 5]]), ["prompt 1 has other tokens"]),
        (OfflineRun(4.0, [[1, 2], [3, 4]]), ["LLM has 0.500 of the server's throughput"]),
    ],
)
def test_what_is_wrong_is_found(offline: OfflineRun, errors: list[str]) -> None:
    outcome = OfflineOutcome(2)
    outcome.compare(OfflineRun(2.0, [[1, 2], [3, 4]]), offline)
    assert outcome.errors == errors
    assert outcome.summary()["different"] == len(outcome.different)
