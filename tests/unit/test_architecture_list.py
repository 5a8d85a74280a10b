"""The list in extending.md of the files that each architecture took is complete, and each of them exists."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ROOT / "worker_svc/model/architectures"
_PAGE = (ROOT / "docs/design/extending.md").read_text()
SECTION = _PAGE[_PAGE.index("What each architecture took") : _PAGE.index("**From another package.**")]
FEATURES = SECTION.partition("Two features")[2]
_FOLDERS = ("worker_svc", "worker_svc/model", "kernels/quire_kernels", "kernels/quire_kernels/cpu")


class Row(NamedTuple):
    """An architecture in the list."""

    module: Path
    num_lines: int
    shared: list[str]  # modules with descriptions of several
    configs: str
    test: str


def _rows() -> Iterator[Row]:
    for line in SECTION.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].startswith("`"):
            _, module, num_lines, shared, tests = cells
            configs, test = re.findall(r"`([^`]+)`", tests)
            yield Row(
                ARCHITECTURES / module.strip("`"), int(num_lines), re.findall(r"`(\w+)\.py`", shared), configs, test
            )


ROWS = list(_rows())


def test_every_architecture_is_in_the_list() -> None:
    registered = sorted(path for path in ARCHITECTURES.glob("*.py") if not path.name.startswith("_"))
    assert sorted(row.module for row in ROWS) == registered


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.module.stem)
def test_an_architecture_took_what_the_list_says(row: Row) -> None:
    text = row.module.read_text()
    assert len(text.splitlines()) == row.num_lines
    assert sorted(set(re.findall(r"from worker_svc\.model\.(describe_\w+) import", text))) == row.shared
    # Nothing else of the worker describes it: what it imports has the descriptions of several, or their types.
    imported = set(re.findall(r"^from worker_svc\.model\.(\w+) import", text, re.MULTILINE)) - set(row.shared)
    assert imported <= {"architecture", "description", "encoder_description", "score_head_description"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.module.stem)
def test_an_architecture_has_configs_and_a_test_that_uses_them(row: Row) -> None:
    pattern = r'Architecture(?:\.of_(?:decoder|encoder|text_model))?\(\s*__file__, "(\w+?)(?:ForCausalLM|Model)?"'
    named = re.search(pattern, row.module.read_text())
    assert named is not None
    configs = (ROOT / "tests/support" / row.configs).read_text()
    assert re.search(rf'\b{named[1]}\w*Config\(|"{named[1]}"', configs), f"no {named[1]} in {row.configs}"
    test = (ROOT / "tests/unit/worker_svc/model" / row.test).read_text()
    assert re.search(rf"^(from|import) {Path(row.configs).stem}\b", test, re.MULTILINE)


def test_the_files_of_new_features_exist_and_none_is_left_out() -> None:
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.(?:py|h))`", FEATURES)}
    files = {path.name for folder in _FOLDERS for path in (ROOT / folder).glob("*.py")}
    files |= {path.name for path in (ROOT / "kernels/quire_kernels/cpu/csrc").glob("*.h")}
    assert named <= files
    own = {name for name in files if re.search("latent|expert", name) and not name.startswith("describe_")}
    assert own <= named
