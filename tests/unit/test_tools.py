"""What CI must have is not skipped there: each package that a test needs is one that .ci/run installs."""

import re
from pathlib import Path

import pytest

from example_programs import COMPILER, JAVA_PACKAGES
from tools import missing, tool

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"\b(tool|missing)\(([^()]*)\)")
INSTALLED = (ROOT / ".ci/apt.txt").read_text().split()


def test_a_missing_program_skips_a_test_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no quire-no-program on the PATH"):
        tool("quire-no-program", "redis-server")
    with pytest.raises(pytest.fail.Exception, match="does not name quire-no-program"):
        tool("quire-no-program")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="the registry does not answer"):
        missing("the registry does not answer")


def test_ci_installs_what_the_examples_need() -> None:
    source = (ROOT / "tests/support/example_programs.py").read_text()
    needed = {COMPILER, *JAVA_PACKAGES.values()}
    for kind, arguments in PROGRAM.findall(source):
        program, *packages = arguments.split(",")
        named = packages if packages or kind == "missing" else [program]
        needed.update(re.findall(r'^\s*"([^"]+)"$', "\n".join(named), re.MULTILINE))
    assert {"nodejs", "npm", "default-jdk-headless", "pkgconf", "libprotobuf-dev"} <= needed
    assert needed <= set(INSTALLED)
    assert len(INSTALLED) == len(set(INSTALLED))
