"""Runs the HTTP tests of other servers against Quire (`make peers`).

    python -m tests.peers [--suites vllm,sglang,llama-cpp] [--tests "*test_completion.py*"]

Their tests come from source distributions, each suite with an environment of its own in build/peers. A suite's
`not_applicable.toml` names the tests that do not apply, with reasons; these are not run. A test whose server refuses a
flag is skipped with the refusal. Exits with 1 if a test failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from environments import bare_environment
from svc_common.models import resolve_model
from tests.peers.suites import SUITES, Suite

TEST_SECONDS = 600


@dataclass(frozen=True)
class Listing:
    """What pytest finds in the files of a suite."""

    tests: list[str]
    broken: set[str]
    """Files that cannot be imported."""

    @classmethod
    def parse(cls, output: str) -> "Listing":
        """Reads the output of `pytest --collect-only -q`."""
        lines = output.splitlines()
        tests = [line for line in lines if "::" in line and not line.startswith("ERROR")]
        return cls(tests, {match[1] for line in lines if (match := re.match(r"ERROR (\S+\.py)\b", line))})


@dataclass(frozen=True)
class Pytest:
    """pytest in the environment and the folder of a suite."""

    python: Path
    folder: Path
    options: tuple[str, ...]

    def list_tests(self, paths: Sequence[str]) -> Listing:
        """The tests in these files and folders."""
        command = [*self._command(), "--collect-only", "-q", *paths]
        done = subprocess.run(command, cwd=self.folder, env=_environment(), stdout=subprocess.PIPE, text=True)
        return Listing.parse(done.stdout)

    def outcomes(self, tests: Sequence[str]) -> dict[str, str]:
        """Runs tests; returns each with its outcome, or with why it was skipped."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        options = ["--timeout", str(TEST_SECONDS), "-q", "--tb=short", "-rf", f"--junit-xml={report}"]
        subprocess.run([*self._command(), *options, *self.options, *tests], cwd=self.folder, env=_environment())
        return read_report(report)

    def _command(self) -> list[str | Path]:
        command: list[str | Path] = [self.python, "-W", "ignore", "-m", "pytest", "-c", os.devnull]
        command += ["--rootdir", self.folder, "-p", "stubs", "-p", "no:cacheprovider"]
        return [*command, "--continue-on-collection-errors"]


def _environment() -> dict[str, str]:
    return bare_environment() | {
        "QUIRE_PYTHON": sys.executable,
        "QUIRE_TOKENIZER": str(resolve_model(None).path),
        "HF_HUB_OFFLINE": "1",
    }


def read_report(report: Path) -> dict[str, str]:
    """The outcome of each test in pytest's report: passed, failed, or why it was skipped."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        has_failed = case.find("failure") is not None or case.find("error") is not None
        why = None if skipped is None else skipped.get("message")
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = why or ("failed" if has_failed else "passed")
    return outcomes


def run_suite(suite: Suite, chosen: str) -> dict[str, Any]:
    """Runs the tests that apply and match `chosen`; returns how many passed, which failed, and why others did not
    run. Files that cannot be imported have failed, unless they do not apply."""
    folder, python = suite.prepare()
    pytest = Pytest(python, folder, suite.options)
    listing = pytest.list_tests(suite.paths)
    reasons = {test: why for test in listing.tests if (why := suite.reason(test)) is not None}
    applying = [test for test in listing.tests if test not in reasons and fnmatchcase(test, chosen)]
    outcomes = pytest.outcomes(applying) if applying else {}
    return {
        "version": suite.version,
        "passed": sum(outcome == "passed" for outcome in outcomes.values()),
        "failed": sorted(test for test, outcome in outcomes.items() if outcome == "failed"),
        "not_imported": sorted(file for file in listing.broken if suite.reason(f"{file}::") is None),
        "refused": Counter(outcome for outcome in outcomes.values() if outcome not in ("passed", "failed")),
        "not_applicable": Counter(reasons.values()),
    }


def main() -> None:
    """Parses the flags, runs the suites, and prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default=",".join(suite.name for suite in SUITES), help="default: %(default)s")
    parser.add_argument("--tests", default="*", help="a pattern of ids; default: all")
    options = parser.parse_args()
    by_name = {suite.name: suite for suite in SUITES}
    names = options.suites.split(",")
    if unknown := set(names) - by_name.keys():
        parser.error(f"no suite is named {', '.join(sorted(unknown))}")
    results = {name: run_suite(by_name[name], options.tests) for name in names}
    print(json.dumps(results, indent=1))
    if not any(result["passed"] or result["failed"] or result["refused"] for result in results.values()):
        parser.exit(1, f"no test applies and matches {options.tests}\n")
    sys.exit(1 if any(result["failed"] or result["not_imported"] for result in results.values()) else 0)


if __name__ == "__main__":
    main()
