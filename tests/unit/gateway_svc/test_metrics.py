"""The gateway's metrics, as a scrape reads them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway_svc.metrics import GatewayMetrics


def scraped(metrics: GatewayMetrics, model: str = "tiny") -> dict[str, float]:
    """The samples of a model, by name and bound."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    samples = [sample for family in families for sample in family.samples if sample.labels.get("model") == model]
    return {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}


def test_tokens_are_counted_for_each_model() -> None:
    metrics = GatewayMetrics(["tiny", "other"])
    for num_tokens in (1, 3):
        metrics.of_model("tiny").tokens.add_tokens(num_tokens)
    assert scraped(metrics)["quire_gateway_generation_tokens_total"] == 4
    assert scraped(metrics, "other")["quire_gateway_generation_tokens_total"] == 0


def test_times_between_tokens_are_a_histogram_whose_buckets_hold_their_bounds() -> None:
    metrics = GatewayMetrics(["tiny", "other"])
    for seconds in (0.0, 0.01, 0.0100001, 0.03, 80.0, 81.0):
        metrics.of_model("tiny").tokens.observe_gap(seconds)
    metrics.of_model("other").tokens.observe_gap(1.0)
    samples = scraped(metrics)
    name = "quire_gateway_inter_token_latency_seconds"
    counts = {bound: samples[f"{name}_bucket{bound}"] for bound in ("0.01", "0.025", "0.05", "40.0", "80.0", "+Inf")}
    assert counts == {"0.01": 2, "0.025": 3, "0.05": 4, "40.0": 4, "80.0": 5, "+Inf": 6}
    assert samples[f"{name}_count"] == 6
    assert samples[f"{name}_sum"] == pytest.approx(161.0500001)


def test_a_model_without_tokens_has_zero_counters() -> None:
    samples = scraped(GatewayMetrics(["tiny"]))
    assert samples["quire_gateway_generation_tokens_total"] == 0
    assert samples["quire_gateway_inter_token_latency_seconds_bucket+Inf"] == 0
    assert samples["quire_gateway_requests_in_flight"] == 0


def test_calls_are_counted_by_the_model_that_they_are_for() -> None:
    metrics = GatewayMetrics(["tiny"])
    with metrics.call("grpc", "Generate", "OK") as outcome:
        outcome.model = "tiny"
    with metrics.call("grpc", "ListModels", "OK"):
        pass
    assert scraped(metrics)["quire_gateway_requests_total"] == 1
    assert scraped(metrics)["quire_gateway_request_seconds_count"] == 1
    assert scraped(metrics, "")["quire_gateway_requests_total"] == 1
