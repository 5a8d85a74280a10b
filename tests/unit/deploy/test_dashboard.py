"""The dashboard for Grafana: its expressions are valid, and name what is exported."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

from exported_metrics import TARGET_LABELS, exported_series, series_in, unknown_in
from helm_chart import CHART
from promtool import promtool

DASHBOARD: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())
TARGETS: list[dict[str, str]] = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_expressions_are_valid(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*")}
        for number, target in enumerate(TARGETS)
    ]
    file = tmp_path / "rules.json"  # which is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))


async def test_panels_show_series_and_labels_that_are_exported() -> None:
    series = await exported_series()
    for target in TARGETS:
        named = series_in(target["expr"])
        assert named
        assert unknown_in(target["expr"], series) == []
        assert all("job" in matched for _, matched in named)
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
        labels = set(re.findall(r"\w+", kept[0])) if kept else TARGET_LABELS
        assert shown <= labels


def test_panels_have_one_data_source_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert {json.dumps(panel["datasource"]) for panel in panels} == {
        json.dumps({"type": "prometheus", "uid": "${datasource}"})
    }
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        assert one["x"] + one["w"] <= 24
        assert any(
            left[place] + left[size] <= right[place]
            for place, size in (("x", "w"), ("y", "h"))
            for left, right in ((one, other), (other, one))
        )
