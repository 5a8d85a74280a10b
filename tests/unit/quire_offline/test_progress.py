"""The progress bar: on standard error, on a terminal or where it was asked for."""

import pytest

from quire_offline import LLM, SamplingParams


def test_the_bar_is_shown_where_it_was_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["hello"] * 3, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert "input" in shown.err
    assert "tokens/s" in shown.err


@pytest.mark.parametrize("use_tqdm", [None, False])
def test_without_a_terminal_nothing_is_shown(
    use_tqdm: bool | None, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=use_tqdm)
    assert capsys.readouterr() == ("", "")
