"""Writes the table of alerts into docs/operations.md from the file of the chart: `python -m docs.tools.alerts`."""

from pathlib import Path
from typing import Any

import yaml

from docs.tools.sections import with_sections

PAGE = Path(__file__).parents[1] / "operations.md"
ALERTS = Path(__file__).parents[2] / "deploy" / "helm" / "quire" / "files" / "alerts.yaml"


def read_alerts() -> list[dict[str, Any]]:
    """The rules of the file, with Prometheus' keys."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def page(text: str) -> str:
    """The page with the table. Raises ValueError where it lacks its section."""
    head = "| alert | severity | expression | `for` | it means |\n|---|---|---|---|---|\n"
    return with_sections(text, {"alerts": head + "".join(map(_row, read_alerts()))})


def _row(rule: dict[str, Any]) -> str:
    expression = rule["expr"].replace("|", "\\|")
    summary = rule["annotations"]["summary"]
    return f"| {rule['alert']} | {rule['labels']['severity']} | `{expression}` | {rule.get('for', '–')} | {summary} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
