"""The documents match the code: links resolve, tables are complete, named modules and functions exist."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from docs.tools import alerts, clients, from_vllm, peers
from docs.tools.figures import FIGURES, FOLDER
from docs.tools.settings import PAGE, page
from exported_metrics import exported_series
from gateway_svc.http_api.errors import HttpError
from quire_client.cli.app import app
from svc_common.errors import QuireError, Reason
from svc_common.service_roles import MAY_CALL
from tests.clients.record import read_record

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_contents() -> None:
    contents = ROOT / "docs/README.md"
    linked = {(contents.parent / name).resolve() for name in re.findall(r"\]\(([^)#]+)", contents.read_text())}
    assert {path for path in PAGES if path != contents} <= linked


def test_the_table_of_errors_is_complete() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \| (\d+) \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    documented = {reason: (code, int(status)) for reason, code, status in rows}
    errors = {reason: QuireError(reason, "") for reason in Reason}
    assert documented == {
        reason.value: (error.code.name, HttpError.of(error).status) for reason, error in errors.items()
    }


def test_the_table_of_callers_is_complete() -> None:
    rows = re.findall(
        r"^\| `(quire\.\S+Service)`.*\| `(\w+)` \|$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE
    )
    inner = {service: roles for service, roles in MAY_CALL.items() if service.startswith("quire.")}
    assert {service: {role} for service, role in rows} == inner


def test_the_page_about_clients_has_what_ran() -> None:
    text = clients.PAGE.read_text()
    assert text == clients.page(text, read_record()), "run `python -m docs.tools.clients`"


def test_the_table_of_commands_is_complete() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    documented = set(re.findall(r"^\| `quire ([a-z-]+)", text, re.MULTILINE))
    with_json = set(re.findall(r"^\| `quire ([a-z-]+).*`--json`", text, re.MULTILINE))
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert documented == set(commands)
    options = {name: [one for each in command.params for one in each.opts] for name, command in commands.items()}
    passed_on = {"doctor"}  # whose flags are another program's
    assert with_json == {name for name in commands if "--json" in options[name]} | passed_on


def test_the_page_of_settings_matches_the_settings() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run `python -m docs.tools.settings`"


def test_the_page_about_vllm_matches_the_flags_and_fields() -> None:
    text = from_vllm.PAGE.read_text()
    assert text == from_vllm.page(text), "run `python -m docs.tools.from_vllm`"


def test_the_page_about_clients_has_the_tests_that_do_not_apply() -> None:
    text = peers.PAGE.read_text()
    assert text == peers.page(text), "run `python -m docs.tools.peers`"


async def test_the_table_of_metrics_is_complete() -> None:
    table = (ROOT / "docs/operations.md").read_text().partition("| metric | type | meaning |")[2].partition("\n\n")[0]
    exported = {re.sub(r"_(bucket|sum|count)$", "", name): one for name, one in (await exported_series()).items()}
    documented: dict[str, str] = {}
    for cell, types, meaning in re.findall(r"^\| (`quire.*?) \| (.*?) \| (.*) \|$", table, re.MULTILINE):
        groups = [re.findall(r"`(\w+)`", group) for group in cell.split("; ")]
        row = {name: kind for names, kind in zip(groups, types.split("; "), strict=True) for name in names}
        labels = set().union(*(exported[name].labels for name in row))
        phrases = re.findall(r"\b(?:by|for each) ([^;.:]*)", re.sub(r"\(.*?\)", "", meaning))
        assert set(re.findall(r"`(\w+)`", ",".join(phrases))) <= labels, cell
        documented |= row
    assert documented == {name: one.type for name, one in exported.items()}


def test_the_table_of_alerts_matches_their_file() -> None:
    text = alerts.PAGE.read_text()
    assert text == alerts.page(text), "run `python -m docs.tools.alerts`"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_its_source_draws(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text() == FIGURES[name](), "run `python -m docs.tools.figures`"


def test_modules_named_in_the_architecture_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folder, missing = "", []
    for line in text[text.index("## Modules") :].splitlines():
        cells = line.split("|")
        if len(cells) < 3:
            continue
        names = re.findall(r"`([^`]+)`", cells[1])
        if "·" not in cells[1]:
            folder = names[0] if names else ""
        for name in names:
            here = ROOT / name if "·" not in cells[1] else ROOT / folder / name
            if not here.exists():
                missing.append(str(here.relative_to(ROOT)))
    assert missing == []


def test_functions_named_in_the_architecture_exist() -> None:
    places = re.findall(r"`([\w/]+\.py)`: `(\w+)\(\)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(places) >= 5
    assert [place for place in places if f"def {place[1]}(" not in _source(place[0])] == []


def _source(path: str) -> str:
    """A module by its path, from the root or from the scheduler's folder."""
    return next(file.read_text() for file in (ROOT / path, ROOT / "scheduler_svc" / path) if file.exists())


def test_the_tests_of_the_threat_model_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists()
        or not re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_every_threat_has_a_test() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("| who, from where |")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 15
    assert [row for row in rows if "::test_" not in row] == []
