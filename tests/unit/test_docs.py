"""What the documents say of the code holds: links lead somewhere, tables match, the modules named exist."""

import re
from pathlib import Path

import pytest

from gateway_svc.openai_http.errors import HttpError
from svc_common.errors import QuireError, Reason

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


def test_every_error_stands_in_the_table_as_it_is() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \| (\d+) \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    told = {reason: (code, int(status)) for reason, code, status in rows}
    errors = {reason: QuireError(reason, "") for reason in Reason}
    assert told == {reason.value: (error.code.name, HttpError.of(error).status) for reason, error in errors.items()}


def test_modules_named_in_the_architecture_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    folder, missing = "", []
    for line in page.splitlines():
        cells = line.split("|")
        if len(cells) < 3:
            continue
        names = [name for name in re.findall(r"`([^`]+)`", cells[1]) if "…" not in name]
        if "·" not in cells[1]:
            folder = names[0] if names else ""
        for name in names:
            here = ROOT / name if "·" not in cells[1] else ROOT / folder / name
            if not here.exists():
                missing.append(str(here.relative_to(ROOT)))
    assert missing == []
