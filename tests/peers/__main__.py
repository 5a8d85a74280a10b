"""Runs the HTTP tests of other servers against Quire (`make peers`).

    python -m tests.peers [--suites vllm] [--tests "*test_completion.py*"]

Their tests come from their source distributions, each suite with an environment of its own in build/peers. A suite's
`not_applicable.toml` names the tests that do not apply, with reasons; these are not run. A test whose server refuses a
flag is skipped with the refusal. Exits with 1 if a test failed.
"""

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from environments import bare_environment
from svc_common.models import resolve_model
from tests.peers.suites import SUITES, Suite

TEST_SECONDS = 600


def run_suite(suite: Suite, chosen: str) -> dict[str, Any]:
    """Runs the tests that apply and match `chosen`; returns how many passed, which failed, and why others did not
    run. Files that cannot be imported have failed, unless they do not apply."""
    folder, python = suite.prepare()
    environment = bare_environment() | {
        "QUIRE_PYTHON": sys.executable,
        "QUIRE_TOKENIZER": str(resolve_model(None).path),
        "HF_HUB_OFFLINE": "1",
    }
    pytest: list[str | Path] = [python, "-W", "ignore", "-m", "pytest", "-c", os.devnull, "--rootdir", folder]
    pytest += ["-p", "stubs", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    listing = [*pytest, "--collect-only", "-q", *suite.paths]
    listed = subprocess.run(listing, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    tests = [line for line in listed.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]
    broken = {line.split()[1] for line in listed.stdout.splitlines() if line.startswith("ERROR tests/")}
    reasons = {test: why for test in tests if (why := suite.reason(test)) is not None}
    applying = [test for test in tests if test not in reasons and fnmatchcase(test, chosen)]
    if not applying:
        raise SystemExit(f"{suite.name}: no test applies and matches {chosen}")
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    options += ["--timeout", str(TEST_SECONDS), "-q", "--tb=short", "-rf", f"--junit-xml={report}"]
    subprocess.run([*pytest, *options, *applying], cwd=folder, env=environment)
    outcomes = dict(_outcomes(report))
    return {
        "version": suite.version,
        "passed": sum(outcome == "passed" for outcome in outcomes.values()),
        "failed": sorted(test for test, outcome in outcomes.items() if outcome == "failed"),
        "not_imported": sorted(file for file in broken if suite.reason(f"{file}::") is None),
        "refused": Counter(outcome for outcome in outcomes.values() if outcome not in ("passed", "failed")),
        "not_applicable": Counter(reasons.values()),
    }


def _outcomes(report: Path) -> Iterator[tuple[str, str]]:
    """Each test with its outcome, or with why it was skipped."""
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        has_failed = case.find("failure") is not None or case.find("error") is not None
        why = None if skipped is None else skipped.get("message")
        yield f"{case.get('classname')}::{case.get('name')}", why or ("failed" if has_failed else "passed")


def main() -> None:
    """Parses the flags, runs the suites, and prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default=",".join(suite.name for suite in SUITES), help="default: %(default)s")
    parser.add_argument("--tests", default="*", help="a pattern of ids; default: all")
    options = parser.parse_args()
    by_name = {suite.name: suite for suite in SUITES}
    results = {name: run_suite(by_name[name], options.tests) for name in options.suites.split(",")}
    print(json.dumps(results, indent=1))
    sys.exit(1 if any(result["failed"] or result["not_imported"] for result in results.values()) else 0)


if __name__ == "__main__":
    main()
