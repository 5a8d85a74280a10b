"""An environment with few packages: some of the test's own, and what they require."""

import sys
import tomllib
import venv
from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def make_environment(folder: Path, names: Collection[str]) -> Path:
    """Makes an environment with these packages in a folder, and returns its Python. They are links to those of the
    test's environment.

    It lacks all that pyproject.toml names and `names` do not, even if one of the packages requires it: other versions
    of that package may not require it. Raises PackageNotFoundError if one of the packages is missing here.
    """
    venv.EnvBuilder(symlinks=True).create(folder)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    barred = _named_by_quire() - {canonicalize_name(name) for name in names}
    for package in _with_requirements(names, barred):
        for path in _top_paths(package):
            if not (site / path.name).exists():  # a folder may have files of several packages
                (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


def _named_by_quire() -> set[str]:
    """The packages that Quire's services and its development need, as pyproject.toml names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups: Iterable[list[str]] = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for group in groups for line in group)]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def _with_requirements(names: Iterable[str], barred: Collection[str]) -> Iterator[Distribution]:
    """The packages of these names, and those that they require without extras."""
    left: list[str] = [canonicalize_name(name) for name in names]
    known = set(barred)
    while left:
        name = left.pop()
        if name not in known:
            known.add(name)
            package = distribution(name)
            yield package
            left += [canonicalize_name(needed.name) for needed in map(Requirement, package.requires or ())
                     if needed.marker is None or needed.marker.evaluate({"extra": ""})]  # fmt: skip


def _top_paths(package: Distribution) -> Iterator[Path]:
    """The files and folders of a package in site-packages, without those that run whenever Python starts."""
    tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
    return (Path(str(package.locate_file(top))) for top in sorted(tops) if not top.endswith(".pth"))
