"""Prometheus' own checks of rules and metrics, by promtool."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import tool


def promtool(*arguments: str, text: str | None = None) -> None:
    """Raises AssertionError with promtool's text where it finds something wrong."""
    command = [tool("promtool", "prometheus"), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def check_firing(
    rules: Path,
    series: Mapping[str, str],
    expected: Mapping[str, Sequence[Mapping[str, str]]],
    directory: Path,
) -> None:
    """Asserts which alerts fire at each time, by these labels of theirs. Series have a value every 15 s."""
    labels = sorted({label for alerts in expected.values() for alert in alerts for label in alert} | {"alertname"})
    test: dict[str, Any] = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'sum by ({",".join(labels)}) (ALERTS{{alertstate="firing"}}) > bool 0',
                "eval_time": time,
                "exp_samples": [{"labels": _selector(alert), "value": 1} for alert in alerts],
            }
            for time, alerts in expected.items()
        ],
    }
    file = directory / "test.json"  # which is YAML
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": [test]}))
    promtool("test", "rules", str(file))


def _selector(labels: Mapping[str, str]) -> str:
    return f"{{{','.join(f'{name}={json.dumps(value)}' for name, value in labels.items())}}}"
