"""Every mutant of the core can still be applied."""

import pytest

from tests.acceptance.core_mutants import CORE, MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.breaks)
def test_mutated_text_stands_exactly_once(mutant: Mutant) -> None:
    assert (ROOT / CORE / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
