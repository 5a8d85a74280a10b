"""The alerts of the chart's file: what they name is exported, and each fires when it should, and only then."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from docs.tools.alerts import ALERTS, read_alerts
from exported_metrics import TARGET_LABELS, exported_series, series_in, unknown_in
from healthy_series import HEALTHY, calls
from promtool import check_firing, promtool

RULES = {rule["alert"]: rule for rule in read_alerts()}

SINCE = 40
"""The number of the value with which something goes wrong, after 10 minutes."""


def changed(before: object, after: object) -> str:
    """Values of a series that change when something goes wrong. Before that `_` stands for none; `stale` is the end."""
    first = f"_x{SINCE}" if before == "_" else f"{before}x{SINCE - 1}"  # promtool repeats a value, and counts gaps
    return f"{first} stale" if after == "stale" else f"{first} {after}x60"


class Case(NamedTuple):
    """Changes of series, and the alerts that fire 15 s, 75 s and 10 minutes later. None: the same as before."""

    series: dict[str, str]
    at_once: set[str]
    after_a_minute: set[str] | None = None
    after_ten_minutes: set[str] | None = None

    @property
    def all(self) -> set[str]:
        """Alerts that fire at some time."""
        return self.at_once.union(self.after_a_minute or (), self.after_ten_minutes or ())


def cases() -> dict[str, Case]:
    ends = {
        instance: {
            name: values.replace("x100", f"x{SINCE - 1} stale")
            for name, values in HEALTHY.items()
            if f'"{instance}"' in name
        }
        for instance in ("s0", "s1", "g0")
    }
    resigned = 'quire_resignations_total{instance="s1",part="workers",error="KeyError"}'
    return {
        "nothing": Case({}, set()),
        "no scheduler leads": Case({'quire_leader{instance="s0"}': changed(1, 0)}, set(), {"QuireNoLeader"}),
        "another leads": Case(
            {'quire_leader{instance="s0"}': changed(1, 0), 'quire_leader{instance="s1"}': changed(0, 1)}, set()
        ),
        "no scheduler is scraped": Case(ends["s0"] | ends["s1"], set(), {"QuireNoLeader", "QuireNoWorker"}),
        "a scrape of the leader fails": Case({'quire_leader{instance="s0"}': f"1x{SINCE - 1} stale _x1 1x60"}, set()),
        "no gateway is scraped": Case(ends["g0"], set(), {"QuireNoGateway"}),
        "the last worker has left": Case(
            {'quire_workers_ready{instance="s0",model="m"}': changed(2, 0)}, set(), {"QuireNoWorker"}
        ),
        "one of two models has no worker yet": Case(
            {'quire_gateway_requests_in_flight{instance="g0",model="n"}': changed("_", 0)}, set(), {"QuireNoWorker"}
        ),
        "the first resignation": Case(
            {resigned: changed("_", 1)}, {"QuireSchedulerResigned"}, {"QuireSchedulerResigned"}, set()
        ),
        "a further resignation": Case(
            {resigned: changed(1, 2)}, {"QuireSchedulerResigned"}, {"QuireSchedulerResigned"}, set()
        ),
        "a worker is set apart": Case(
            {'quire_workers_set_apart{instance="s0",worker="10.0.0.1:50053"}': changed("_", 1)}, {"QuireWorkerSetApart"}
        ),
        "a step failed": Case(
            {'quire_worker_failed_steps_total{instance="w1"}': changed(0, 1)},
            {"QuireWorkerStepsFailed"},
            {"QuireWorkerStepsFailed"},
            set(),
        ),
        "the first invalid response": Case(
            {'quire_responses_refused_total{instance="s0",reason="sequences"}': changed(0, 1)},
            {"QuireResponsesRefused"},
            {"QuireResponsesRefused"},
            set(),
        ),
        "a sequence failed for lack of memory": Case(
            {'quire_worker_out_of_memory_total{instance="w0"}': changed(0, 1)}, {"QuireWorkerOutOfMemory"}
        ),
        "memory stays critical": Case(
            {'quire_worker_memory_pressure{instance="w0"}': changed(0, 2)}, set(), set(), {"QuireWorkerMemoryCritical"}
        ),
        "Redis is away": Case({'quire_store_degraded{instance="s0"}': changed(0, 1)}, {"QuireStoreDegraded"}),
        "Redis may evict": Case(
            {
                'quire_store_eviction_policy{instance="s0",policy="noeviction"}': changed(1, "stale"),
                'quire_store_eviction_policy{instance="s0",policy="allkeys-lru"}': changed("_", 1),
            },
            {"QuireStoreEvicts"},
        ),
        "Redis has lost writes": Case(
            {'quire_journal_gaps_total{instance="s0"}': changed(0, 2)},
            {"QuireStoreLostWrites"},
            {"QuireStoreLostWrites"},
            set(),
        ),
        "requests are not recorded": Case(
            {'quire_journal_dropped_total{instance="s0"}': changed(0, 2)},
            {"QuireRequestsUnrecorded"},
            {"QuireRequestsUnrecorded"},
            set(),
        ),
        "the first internal error": Case(
            {calls("500", "/v1/responses"): changed("_", 1)},
            {"QuireInternalErrors"},
            {"QuireInternalErrors"},
            set(),
        ),
        "a further internal error": Case(
            {calls("500"): changed(1, 2)}, {"QuireInternalErrors"}, {"QuireInternalErrors"}, set()
        ),
        "an internal error over gRPC": Case(
            {calls("INTERNAL", "Generate", "grpc"): changed("_", 1)},
            {"QuireInternalErrors"},
            {"QuireInternalErrors"},
            set(),
        ),
        "many calls are rejected from the first one on": Case(
            {calls("503"): changed("_", "1+2")}, set(), set(), {"QuireCallsRejected"}
        ),
        "many calls are rejected over gRPC": Case(
            {calls("UNAVAILABLE", "Generate", "grpc"): changed(0, "1+2")},
            set(),
            set(),
            {"QuireCallsRejected"},
        ),
        "clients send wrong requests": Case({calls("400"): changed(0, "1+20")}, set()),
    }


CASES = cases()


def test_the_file_is_one_of_rules_for_prometheus() -> None:
    promtool("check", "rules", str(ALERTS))


async def test_alerts_name_series_and_labels_that_are_exported() -> None:
    series = await exported_series()
    for rule in RULES.values():
        assert series_in(rule["expr"])
        assert unknown_in(rule["expr"], series) == []
        shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert shown <= TARGET_LABELS.union(*(series[name].labels for name, _ in series_in(rule["expr"])))


def test_each_alert_has_a_severity_and_says_what_to_do() -> None:
    for rule in RULES.values():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert not re.search(r"[.{]", rule["annotations"]["summary"])  # it is a cell of a table, too
        assert rule["annotations"]["description"].endswith(".")


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    after_a_minute = case.at_once if case.after_a_minute is None else case.after_a_minute
    after_ten_minutes = after_a_minute if case.after_ten_minutes is None else case.after_ten_minutes
    expected = {"9m45s": set(), "10m15s": case.at_once, "11m15s": after_a_minute, "20m": after_ten_minutes}
    alerts = {time: [{"alertname": alert} for alert in alerts] for time, alerts in expected.items()}
    check_firing(ALERTS, HEALTHY | case.series, alerts, tmp_path)


def test_each_alert_fires_in_a_case() -> None:
    assert set().union(*(case.all for case in CASES.values())) == set(RULES)
