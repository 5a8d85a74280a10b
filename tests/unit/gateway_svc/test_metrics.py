"""The gateway's metrics, as a scrape reads them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway_svc.metrics import GatewayMetrics


def scraped(metrics: GatewayMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}


def test_tokens_are_counted() -> None:
    metrics = GatewayMetrics()
    for num_tokens in (1, 3):
        metrics.tokens.add_tokens(num_tokens)
    assert scraped(metrics)["quire_gateway_generation_tokens_total"] == 4


def test_times_between_tokens_are_a_histogram_whose_buckets_hold_their_bounds() -> None:
    metrics = GatewayMetrics()
    for seconds in (0.0, 0.01, 0.0100001, 0.03, 80.0, 81.0):
        metrics.tokens.observe_gap(seconds)
    samples = scraped(metrics)
    name = "quire_gateway_inter_token_latency_seconds"
    counts = {bound: samples[f"{name}_bucket{bound}"] for bound in ("0.01", "0.025", "0.05", "40.0", "80.0", "+Inf")}
    assert counts == {"0.01": 2, "0.025": 3, "0.05": 4, "40.0": 4, "80.0": 5, "+Inf": 6}
    assert samples[f"{name}_count"] == 6
    assert samples[f"{name}_sum"] == pytest.approx(161.0500001)


def test_a_gateway_that_has_generated_nothing_says_so() -> None:
    samples = scraped(GatewayMetrics())
    assert samples["quire_gateway_generation_tokens_total"] == 0
    assert samples["quire_gateway_inter_token_latency_seconds_bucket+Inf"] == 0
