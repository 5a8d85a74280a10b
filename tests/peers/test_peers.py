"""The suites of other servers: their environments are pinned, each test that is left out has a reason, and results are
read from pytest's output."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from svc_common.supervisor.serve import variables_of
from tests.peers.__main__ import Listing, Pytest, Run
from tests.peers.results import Applying, keep_outcomes, kept_outcomes, read_outcomes, summary
from tests.peers.suites import SUITES, Suite
from tests.peers.support import empty_modules, outcome_log
from tests.peers.support.embedding_checks import HfRunner, run_embedding_correctness_test

each_suite = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)


@each_suite
def test_what_a_suite_needs_is_pinned(suite: Suite) -> None:
    assert re.fullmatch("[0-9a-f]{64}", suite.sha256)
    assert re.search("^pytest==", suite.requirements.read_text(), re.MULTILINE)
    assert any((suite.support / "files").rglob("*.py"))


@each_suite
def test_a_test_is_left_out_by_one_reason(suite: Suite) -> None:
    table = tomllib.loads((suite.support / "not_applicable.toml").read_text())
    patterns = [pattern for reason in suite.reasons for pattern in reason.tests]
    assert len(patterns) == len(set(patterns)) == sum(len(each["tests"]) for each in table["reasons"]) > 0
    assert all(reason.why for reason in suite.reasons)
    assert suite.reason("tests/that/does_not_exist.py::test_it") is None
    for reason in suite.reasons:
        for pattern in reason.tests:
            assert suite.reason(pattern.replace("[[]", "[").replace("*", "x")) == reason


def test_a_listing_has_tests_and_files_that_cannot_be_imported() -> None:
    test, broken = "unit/test_a.py::test_it[x - y]", "ERROR unit/test_b.py - ImportError: a::b"
    output = f"{test}\n{broken}\nERROR    root:c.py:1 it::failed\n"
    assert Listing.parse(output) == Listing([test], {"unit/test_b.py"})


def report(when: str, outcome: str, longrepr: Any = None) -> Any:
    phase = SimpleNamespace(nodeid="a.py::test", when=when, longrepr=longrepr)
    phase.failed, phase.skipped = outcome == "failed", outcome == "skipped"
    return phase


@pytest.mark.parametrize(
    ("phases", "outcome"),
    [
        ([("setup", "passed"), ("call", "passed"), ("teardown", "passed")], "passed"),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "passed")], "failed"),
        ([("setup", "failed"), ("teardown", "passed")], "failed"),
        ([("setup", "passed"), ("call", "passed"), ("teardown", "failed")], "failed"),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "skipped")], "failed"),
        ([("setup", "skipped", ("a.py", 1, "Skipped: refused: --flag")), ("teardown", "passed")], "refused: --flag"),
    ],
)
def test_the_phases_of_a_test_are_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phases: list[tuple[Any, ...]], outcome: str
) -> None:
    monkeypatch.setenv("QUIRE_OUTCOMES", str(tmp_path / "log"))
    for phase in phases:
        outcome_log.pytest_runtest_logreport(report(*phase))
    assert read_outcomes(tmp_path / "log") == {"a.py::test": outcome}


def test_a_summary_counts_what_ran_and_what_does_not_apply() -> None:
    suite = next(suite for suite in SUITES if suite.name == "sglang")
    found = ["server_tests.py::TestMMMUMixin::test_a", *(f"server_tests.py::test_{name}" for name in "abcde")]
    applying = Applying.of(suite, found)
    a, b, c, d, _ = applying.tests
    outcomes = {a: "passed", b: "failed", c: "refused: --x", d: "refused: --x", "another": "passed"}
    assert summary(suite, applying, outcomes, ["broken.py"], "exit status 3") == {
        "version": suite.version,
        "passed": 1,
        "failed": [b],
        "not_imported": ["broken.py"],
        "skipped": {"refused: --x": [c, d]},
        "not_run": 1,
        "excluded": {"feature": 1},
        "pytest": "exit status 3",
    }
    assert "pytest" not in summary(suite, applying, outcomes, [], None)


TESTS = """
import os
def test_a(): pass
def test_b(): os._exit({status})
def test_c(): pass
"""


def suite_of_tests(folder: Path, code: str) -> Pytest:
    (folder / "stubs.py").touch()
    (folder / "test_it.py").write_text(code)
    paths = os.pathsep.join([str(folder), *sys.path])
    # Without other plugins of this environment, whose imports would be most of the time.
    variables = {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
    return Pytest(Path(sys.executable), folder, (), os.environ | variables)


@pytest.mark.parametrize(
    ("status", "death"), [(0, None), (3, "exit status 3")], ids=["as if all had passed", "with another status"]
)
def test_what_a_dying_pytest_does_not_reach_has_failed(tmp_path: Path, status: int, death: str | None) -> None:
    suite = suite_of_tests(tmp_path, TESTS.format(status=status))
    tests = [f"test_it.py::test_{name}" for name in "abc"]
    assert suite.list_tests(["test_it.py"]) == Listing(tests, set())
    assert suite.run(tests) == Run(dict(zip(tests, ("passed", "failed", "failed"), strict=True)), death)


def test_a_pytest_that_dies_lists_no_tests(tmp_path: Path) -> None:
    suite = suite_of_tests(tmp_path, "def test_a(): pass\nraise ImportError('x')")
    assert suite.list_tests(["test_it.py"]) == Listing([], {"test_it.py"})
    suite = suite_of_tests(tmp_path, "import os\ndef test_a(): pass\nos._exit(9)")
    with pytest.raises(subprocess.CalledProcessError):
        suite.list_tests(["test_it.py"])


def test_a_run_leaves_out_what_passed_on_the_same_code(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.json"
    assert kept_outcomes(path, "code") == {}
    keep_outcomes(path, "code", {"a": "passed", "b": "failed", "c": "refused: --x"})
    assert kept_outcomes(path, "code") == {"a": "passed", "c": "refused: --x"}
    assert kept_outcomes(path, "other") == kept_outcomes(path, None) == {}


def test_vectors_are_compared_with_those_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, sys\nprint('{}', flush=True)\n"
        "for line in sys.stdin:\n"
        "    (texts,) = json.loads(line)['batches']\n"
        "    print(json.dumps({'vectors': [[len(text), 1.0] for text in texts]}), flush=True)"
    )
    monkeypatch.setenv("QUIRE_REFERENCE", json.dumps([sys.executable, "-c", program]))
    with HfRunner("model", dtype="float32") as runner:
        run_embedding_correctness_test(runner, ["a", "abc"], [[2.0, 2.0], [3.0, 1.0]])
        with pytest.raises(AssertionError, match="differ at 1"):
            run_embedding_correctness_test(runner, ["a", "abc"], [[2.0, 2.0], [1.0, 3.0]])


def test_modules_that_are_not_installed_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    empty_modules.provide(("quire_absent",), {"given": 1})
    module = importlib.import_module("quire_absent.part")
    assert module.given == 1
    assert callable(module.anything)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("quire_absentee")


def test_a_server_of_llama_cpp_has_the_same_settings_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    theirs = ModuleType("utils")
    theirs.__dict__.update(ServerProcess=SimpleNamespace(), ServerPreset=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "utils", theirs)
    stubs = importlib.import_module("tests.peers.llama_cpp.files.stubs")
    settings = {"temperature": 0.8, "n_predict": 64, "n_ctx": 512, "n_slots": 2, "n_batch": 32, "api_key": None}
    kinds = {"server_embeddings": False, "server_reranking": False}
    server = SimpleNamespace(**settings, **kinds, chat_template_file="template.jinja", model_alias="tinyllama-2")
    variables = variables_of(stubs.flags(server))
    names = variables.pop("QUIRE_SERVED_MODEL_NAME")
    assert names.startswith("tinyllama-2")
    assert variables == {
        "QUIRE_OVERRIDE_GENERATION_CONFIG": '{"temperature": 0.8, "max_new_tokens": 64}',
        "QUIRE_MAX_MODEL_LEN": "256",
        "QUIRE_MAX_SEQUENCES": "2",
        "QUIRE_MAX_STEP_TOKENS": "32",
        "QUIRE_CHAT_TEMPLATE": "template.jinja",
    }
    monkeypatch.setenv("QUIRE_EMBEDDING_MODEL", "/models/encoder")
    variables = variables_of(stubs.flags(SimpleNamespace(**vars(server) | {"server_reranking": True})))
    assert variables == {"QUIRE_MODEL": "/models/encoder", "QUIRE_SERVED_MODEL_NAME": names}
