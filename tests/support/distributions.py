"""Installs a package of a test's own, with one entry point, for as long as the test runs."""

import sys
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch, site: Path, distribution: str, group: str, entry_point: str, source: str
) -> None:
    """Puts a distribution into the new directory `site`: `entry_point` is "name = module:value", the module `source`.

    Its version is 1.0. A second one of the same name goes before the first.
    """
    metadata = site / f"{distribution}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry_point}\n")
    module = entry_point.partition("=")[2].partition(":")[0].strip()
    (site / f"{module}.py").write_text(source)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(site))


def set_version(site: Path, distribution: str, version: str) -> None:
    """Installs another version of the distribution in `site`."""
    (metadata,) = site.glob(f"{distribution}-*.dist-info")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
