"""The programs that `make acceptance` runs report failures of what they run."""

import pytest

from tests.acceptance.__main__ import read_summary, run_part


@pytest.mark.parametrize(("option", "passed"), [("--version", True), ("--no-such-option", False)])
def test_a_part_passes_if_its_program_exits_with_0(
    option: str, passed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run_part(("tests.acceptance.tests_under_load", "--runs", "2", "--busy", "1", f"--test-args={option}"))
    assert result["passed"] is passed
    assert [run["passed"] for run in result["summary"]["runs"]] == [passed, passed]
    assert "run 2 of 2" in capfd.readouterr().out


def test_a_summary_in_json_is_kept_as_an_object() -> None:
    assert read_summary('{"lost": 0}') == {"lost": 0}
    assert read_summary("lost=0") == "lost=0"
