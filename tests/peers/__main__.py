"""Runs the HTTP tests of other servers against Quire (`make peers`).

    python -m tests.peers [--suites vllm,sglang,llama-cpp] [--tests "*test_completion.py*"] [--resume]

Their tests come from source distributions, each suite with an environment of its own in build/peers. A suite's
`not_applicable.toml` names the tests that do not apply, with reasons; these are not run. A test whose server refuses a
flag is skipped with the refusal. With --resume, what an earlier run of the same committed code has passed or skipped is
not run again.

The last line is JSON: for each suite the numbers of tests that passed, were skipped, were not run and do not apply, and
the names of those that failed. Exits with 1 if a test failed.
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
    variables: Mapping[str, str]

    def list_tests(self, paths: Sequence[str]) -> Listing:
        """The tests in these files and folders."""
        command = [*self._command(), "--collect-only", "-q", *paths]
        done = subprocess.run(command, cwd=self.folder, env={**self.variables}, stdout=subprocess.PIPE, text=True)
        return Listing.parse(done.stdout)

    def outcomes(self, tests: Sequence[str]) -> dict[str, str]:
        """Runs tests; returns each with its outcome, or with why it was skipped."""
        log = self.folder / f"outcomes-{os.getpid()}.jsonl"
        options = ["--timeout", str(TEST_SECONDS), "-q", "--tb=short", "-rf", "-p", "tests.peers.support.outcome_log"]
        subprocess.run(
            [*self._command(), *options, *self.options, *tests],
            cwd=self.folder,
            env={**self.variables, "QUIRE_OUTCOMES": str(log)},
        )
        outcomes = read_outcomes(log)
        log.unlink(missing_ok=True)
        return outcomes

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
    if tests:
        found = pytest.outcomes(tests)
        outcomes |= found
        # Another run may have kept its own meanwhile.
        keep_outcomes(kept_in, code, kept_outcomes(kept_in, code) | found)
    return summary(suite, applying, outcomes, (file for file in listing.broken if suite.reason(f"{file}::") is None))


def main() -> None:
    """Parses the flags, runs the suites, and prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default=",".join(suite.name for suite in SUITES), help="default: %(default)s")
    parser.add_argument("--tests", default="*", help="a pattern of ids; default: all")
    parser.add_argument("--resume", action="store_true", help="leave out what earlier runs of this code have passed")
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
    print(json.dumps(results), flush=True)
    if not any(result["passed"] or result["failed"] or result["skipped"] for result in results.values()):
        parser.exit(1, f"no test applies and matches {options.tests}\n")
    sys.exit(1 if has_failed else 0)


if __name__ == "__main__":
    main()
