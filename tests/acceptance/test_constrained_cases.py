"""The check of constrained outputs finds wrong ones."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from svc_common.models import resolve_model
from svc_common.supervisor.prepare import prepare_model
from tests.acceptance.constrained_cases import Judge, load_cases

_AT = '{"start": "DAYT00:00:00Z", "end": "DAYT00:00:00-00:00"}'
CASES = {case.name: case for case in load_cases()}


@pytest.fixture
async def model() -> Path:
    await prepare_model({})
    return resolve_model(None).path


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("const", '{"version": "v1", "ok": true}', '{"version": "v2", "ok": true}'),
        ("date", '{"day": "2026-11-21"}', '{"day": "2026-11-31"}'),
        ("date", '{"day": "0000-02-29"}', '{"day": "0000-02-30"}'),
        ("date-time", _AT.replace("DAY", "0000-01-01"), _AT.replace("DAY", "0000-13-01")),
        ("time and duration", '{"at": "10:00:00Z", "lasts": "PT1H"}', '{"at": "10:00:00Z", "lasts": "P"}'),
        ("any number", '{"n": 1}', '{"n": NaN}'),
        ("(a|b)*c", "abc", "abcd"),
    ],
)
def test_texts_are_valid_or_not(name: str, right: str, wrong: str) -> None:
    assert CASES[name].is_valid(right)
    assert not CASES[name].is_valid(wrong)


async def test_a_cut_text_is_a_prefix_of_a_valid_one_or_not(model: Path) -> None:
    judge, tokenizer = Judge(model), Tokenizer.from_file(str(model / "tokenizer.json"))
    assert judge.is_prefix(CASES["date"], tokenizer.encode('{"day": "2026-1').ids)
    assert not judge.is_prefix(CASES["date"], tokenizer.encode('{"day": "2026-13').ids)
    assert judge.is_prefix(CASES["(a|b)*c"], [])


async def test_every_case_has_a_valid_text(model: Path) -> None:
    judge = Judge(model)
    assert len(CASES) == 60
    assert [case.name for case in CASES.values() if not judge.is_prefix(case, [])] == []
