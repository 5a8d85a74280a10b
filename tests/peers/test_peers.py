"""The suites of other servers: their environments are pinned, each test that is left out has a reason, and results are
read from pytest's output."""

import importlib
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from svc_common.supervisor.serve import variables_of
from tests.peers.__main__ import Listing, read_report
from tests.peers.suites import SUITES, Suite
from tests.peers.support import empty_modules

each_suite = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)


@each_suite
def test_what_a_suite_needs_is_pinned(suite: Suite) -> None:
    assert re.fullmatch("[0-9a-f]{64}", suite.sha256)
    assert re.search("^pytest==", suite.requirements.read_text(), re.MULTILINE)
    assert any((suite.support / "files").rglob("*.py"))


@each_suite
def test_a_test_is_left_out_by_one_reason(suite: Suite) -> None:
    patterns = suite.not_applicable()
    table = tomllib.loads((suite.support / "not_applicable.toml").read_text())
    assert len(patterns) == sum(len(each["tests"]) for each in table["reasons"]) > 0
    assert all(patterns.values())
    assert suite.reason("tests/that/does_not_exist.py::test_it") is None
    for pattern, why in patterns.items():
        assert suite.reason(pattern.replace("[[]", "[").replace("*", "x")) == why


def test_a_listing_has_tests_and_files_that_cannot_be_imported() -> None:
    test, broken = "unit/test_a.py::test_it[x - y]", "ERROR unit/test_b.py - ImportError: a::b"
    output = f"{test}\n{broken}\nERROR    root:c.py:1 it::failed\n"
    assert Listing.parse(output) == Listing([test], {"unit/test_b.py"})


def test_a_report_has_an_outcome_for_each_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="a" name="passes"/>
        <testcase classname="a" name="fails"><failure message="no"/></testcase>
        <testcase classname="a" name="breaks"><error message="no"/></testcase>
        <testcase classname="a" name="is_refused"><skipped message="refused: --flag"/></testcase>
        </testsuite></testsuites>"""
    )
    assert read_report(report) == {
        "a::passes": "passed",
        "a::fails": "failed",
        "a::breaks": "failed",
        "a::is_refused": "refused: --flag",
    }


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
    server = SimpleNamespace(**settings, chat_template_file="template.jinja", model_alias="tinyllama-2")
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
