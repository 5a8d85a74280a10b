"""The test suites of other servers that Quire is held against, and which of their tests do not apply to it."""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from urllib.parse import urljoin

from tests.clients.table import ROOT, install

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "peers"
SHARED = HERE / "support"
"""What the files of several suites import."""


class Ground(StrEnum):
    """Why tests do not apply, in short."""

    INTERFACE = "interface"
    """They ask for a route, field, header, flag, metric or wording that only the other server has."""
    MODEL = "model"
    """They need another model: a larger one, one of another kind, or its words and tokens."""
    CODE = "code"
    """They test the other server's own code, or need its data or environment."""
    FEATURE = "feature"
    """Quire does not have what they ask for, on purpose or not yet."""
    ANSWER = "answer"
    """Quire answers differently on purpose."""


@dataclass(frozen=True)
class Reason:
    """Why tests do not apply."""

    ground: Ground
    why: str
    tests: tuple[str, ...]
    """Patterns of their ids."""


@dataclass(frozen=True)
class Suite:
    """Tests in the source distribution of a package. None of their code is kept here."""

    name: str
    package: str
    version: str
    sha256: str
    """Of the source distribution."""
    folders: tuple[str, ...]
    """What of it is taken."""
    paths: tuple[str, ...]
    """Files and folders with tests that ask a server, below `home`."""
    home: str = "."
    """The folder of the source distribution that the tests run in."""
    options: tuple[str, ...] = ()
    """Of pytest."""
    embeds: bool = False
    """Whether its tests need the model that computes embeddings."""

    @property
    def support(self) -> Path:
        """Our part: `files` are laid over those in `home`; `not_applicable.toml` names tests, with reasons."""
        return HERE / self.name.replace("-", "_")

    @property
    def requirements(self) -> Path:
        """What the tests themselves need."""
        return ROOT / "requirements" / f"peer-{self.name}.txt"

    @cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """Why tests do not apply."""
        table = tomllib.loads((self.support / "not_applicable.toml").read_text())
        return tuple(Reason(Ground(one["ground"]), one["why"], tuple(one["tests"])) for one in table["reasons"])

    def reason(self, test: str) -> Reason | None:
        """Why a test does not apply; None: it does."""
        found = (one for one in self.reasons if any(fnmatchcase(test, pattern) for pattern in one.tests))
        return next(found, None)

    def prepare(self) -> tuple[Path, Path]:
        """Makes the folder that the tests run in, and their environment; returns the folder and the environment's
        Python. Raises CalledProcessError and OSError."""
        python = install(BUILD / f"{self.name}-environment", self.requirements)
        home = self.unpack() / self.home
        shutil.copytree(self.support / "files", home, dirs_exist_ok=True)
        shutil.copytree(SHARED, home / SHARED.relative_to(ROOT), dirs_exist_ok=True)
        return home, python

    def unpack(self) -> Path:
        """Extracts `folders` of the source distribution, which is downloaded once. Returns where. Raises OSError."""
        folder = BUILD / self.name
        root = f"{self.package.replace('-', '_')}-{self.version}/"
        with tarfile.open(self._source()) as source:
            for member in source:
                if member.name.startswith(tuple(f"{root}{taken}/" for taken in self.folders)):
                    member.name = member.name.removeprefix(root)
                    source.extract(member, folder, filter="data")
        return folder

    def _source(self) -> Path:
        """The source distribution. pip would build it to know what it needs, so it is read from pip's index here."""
        path = BUILD / f"{self.package.replace('-', '_')}-{self.version}.tar.gz"
        if not path.exists():
            BUILD.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(f"{_index()}/{self.package}/") as page:
                link = re.search(rf'href="((?:[^"#]*/)?{re.escape(path.name)})[#"]', page.read().decode())
            if link is None:
                raise OSError(f"the package index has no {path.name}")
            with urllib.request.urlopen(urljoin(page.url, link[1])) as source:
                path.write_bytes(source.read())
        if hashlib.sha256(path.read_bytes()).hexdigest() != self.sha256:
            path.unlink()
            raise OSError(f"{path.name} is not the file that was chosen")
        return path


def _index() -> str:
    """The index that pip uses."""
    known = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    default = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return re.sub("/$", "", (known.stdout if known.returncode == 0 else default.stdout).strip())


SUITES = (
    Suite(
        "vllm",
        "vllm",
        "0.33.0",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        ("tests/entrypoints",),
        (
            "tests/entrypoints/openai",
            "tests/entrypoints/anthropic",
            "tests/entrypoints/serve",
            "tests/entrypoints/pooling",
        ),
        options=("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"),
        embeds=True,
    ),
    Suite(
        "sglang",
        "sglang",
        "0.5.10.post1",
        "01f7adfe7cde85b238fb0e1bae4b31d494e19d1471cf35ff3c5489a02f9d2263",
        ("sglang/test",),
        ("server_tests.py",),
    ),
    Suite(
        "llama-cpp",
        "llama-cpp-python",
        "0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        ("vendor/llama.cpp/tools/server/tests", "vendor/llama.cpp/models/templates"),
        ("unit",),
        "vendor/llama.cpp/tools/server/tests",
        embeds=True,
    ),
)
