"""Runs the HTTP tests of other servers against Quire (`make peers`).

    python -m tests.peers [--suites vllm,sglang,llama-cpp] [--tests "*test_completion.py*"] [--resume]

Their tests come from source distributions, each suite with an environment of its own in build/peers. A suite's
`not_applicable.toml` names the tests that do not apply, with reasons; these are not run. A test whose server refuses a
flag is skipped with the refusal. A test that was started and has no outcome has failed: pytest died in it or before it.

The last line is JSON: for each suite the numbers of tests that passed, were skipped, were not run and do not apply, and
the names of those that failed. Exits with 1 if a test failed, or pytest did.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.embeddings.environments import model_directory
from benchmarks.embeddings.systems import SENTENCE_TRANSFORMERS
from benchmarks.record import ROOT, code_hash
from environments import bare_environment
from svc_common.models import resolve_model
from tests.peers.results import Applying, keep_outcomes, kept_outcomes, read_outcomes, summary
from tests.peers.suites import BUILD, SUITES, Suite
from tests.peers.support.outcome_log import FAILED

TEST_SECONDS = 1200
"""Of a test. Two answers that fill the context of the default model take 7 minutes on two busy cores."""
# Options for all runs of the caller's pytest are not those of these tests.
_NO_OPTIONS = {"PYTEST_ADDOPTS": ""}
_LISTED, _RAN = {0, 1, 2}, {0, 1}
"""pytest's exit statuses when it has listed all tests, some of them in files that it cannot import, and has run all."""


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
class Run:
    """A run of tests by pytest."""

    outcomes: dict[str, str]
    """Of each test; a test that pytest did not reach has failed."""
    death: str | None
    """How pytest itself failed."""


@dataclass(frozen=True)
class Pytest:
    """pytest in the environment and the folder of a suite."""

    python: Path
    folder: Path
    options: tuple[str, ...]
    variables: Mapping[str, str]

    def list_tests(self, paths: Sequence[str]) -> Listing:
        """The tests in these files and folders. Raises CalledProcessError if pytest does not list them all."""
        command = [*self._command(), "--collect-only", "-q", *paths]
        variables = {**self.variables, **_NO_OPTIONS}
        done = subprocess.run(command, cwd=self.folder, env=variables, stdout=subprocess.PIPE, text=True)
        if done.returncode not in _LISTED:
            done.check_returncode()
        return Listing.parse(done.stdout)

    def run(self, tests: Sequence[str]) -> Run:
        """Runs tests."""
        log = self.folder / f"outcomes-{os.getpid()}.jsonl"
        options = ["--timeout", str(TEST_SECONDS), "-q", "--tb=short", "-rf", "-p", "tests.peers.support.outcome_log"]
        done = subprocess.run(
            [*self._command(), *options, *self.options, *tests],
            cwd=self.folder,
            env={**self.variables, **_NO_OPTIONS, "QUIRE_OUTCOMES": str(log)},
        )
        outcomes = dict.fromkeys(tests, FAILED) | read_outcomes(log)
        log.unlink(missing_ok=True)
        return Run(outcomes, None if done.returncode in _RAN else f"exit status {done.returncode}")

    def _command(self) -> list[str | Path]:
        command: list[str | Path] = [self.python, "-W", "ignore", "-m", "pytest", "-c", os.devnull]
        command += ["--rootdir", self.folder, "-p", "stubs", "-p", "no:cacheprovider"]
        return [*command, "--continue-on-collection-errors"]


def _variables(suite: Suite) -> dict[str, str]:
    variables = bare_environment() | {
        "QUIRE_PYTHON": sys.executable,
        # The environment may have the code of another checkout.
        "QUIRE_PATHS": os.pathsep.join(str(ROOT / part) for part in ("", "protos", "kernels", "client")),
        "QUIRE_TOKENIZER": str(resolve_model(None).path),
        "HF_HUB_OFFLINE": "1",
    }
    if suite.embeds:
        reference = json.dumps([str(part) for part in SENTENCE_TRANSFORMERS.command()])
        variables |= {"QUIRE_EMBEDDING_MODEL": str(model_directory()), "QUIRE_REFERENCE": reference}
    return variables


def run_suite(suite: Suite, chosen: str, *, resumes: bool) -> dict[str, Any]:
    """Runs the tests that apply and match `chosen`; returns what is known of them and of those of earlier runs, if it
    `resumes` these. Files that cannot be imported have failed, unless they do not apply."""
    folder, python = suite.prepare()
    pytest = Pytest(python, folder, suite.options, _variables(suite))
    listing = pytest.list_tests(suite.paths)
    applying = Applying.of(suite, listing.tests)
    code, kept_in = code_hash(), BUILD / f"{suite.name}-outcomes.json"
    outcomes = kept_outcomes(kept_in, code) if resumes else {}
    tests = [test for test in applying.tests if test not in outcomes and fnmatchcase(test, chosen)]
    death = None
    if tests:
        run = pytest.run(tests)
        outcomes, death = outcomes | run.outcomes, run.death
        # Another run may have kept its own meanwhile.
        keep_outcomes(kept_in, code, kept_outcomes(kept_in, code) | run.outcomes)
    not_imported = (file for file in listing.broken if suite.reason(f"{file}::") is None)
    return summary(suite, applying, outcomes, not_imported, death)


def main() -> None:
    """Parses the flags, runs the suites, and prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default=",".join(suite.name for suite in SUITES), help="default: %(default)s")
    parser.add_argument("--tests", default="*", help="a pattern of ids; default: all")
    resume = "leave out tests that passed, or were skipped, in earlier runs of the same committed code"
    parser.add_argument("--resume", action="store_true", help=resume)
    options = parser.parse_args()
    by_name = {suite.name: suite for suite in SUITES}
    names = options.suites.split(",")
    if unknown := set(names) - by_name.keys():
        parser.error(f"no suite is named {', '.join(sorted(unknown))}")
    results = {name: run_suite(by_name[name], options.tests, resumes=options.resume) for name in names}
    has_failed = False
    for name, result in results.items():
        for test in (*result["failed"], *result["not_imported"]):
            has_failed = True
            print(f"{name}: {test} failed")
        if death := result.get("pytest"):
            has_failed = True
            print(f"{name}: pytest failed, {death}")
    print(json.dumps(results), flush=True)
    if not any(result["passed"] or result["failed"] or result["skipped"] for result in results.values()):
        parser.exit(1, f"no test applies and matches {options.tests}\n")
    sys.exit(1 if has_failed else 0)


if __name__ == "__main__":
    main()
