"""Installs a package with one entry point for the duration of a test."""

import sys
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch, site: Path, distribution: str, group: str, entry_point: str, source: str
) -> None:
    """Installs a distribution, version 1.0, into the new directory `site`.

    `entry_point` is "name = module:value"; `module` is the source of the module. A later distribution of the same name
    takes precedence.
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
