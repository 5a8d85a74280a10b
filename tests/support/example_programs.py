"""The programs in client/examples, each built as its first comment says. Folders below build/examples are kept."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import google.rpc
import pytest

from tests.clients.table import make_once
from tools import missing, tool

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "client" / "examples"
SERVICE_CONFIG = ROOT / "client" / "quire_client" / "service_config.json"
CONTRACT = "quire/inference/v1/inference.proto"
DETAILS = ("google/rpc/status.proto", "google/rpc/error_details.proto")
JARS = Path("/usr/share/java")
GO_PACKAGES = Path("/usr/share/gocode")
NPM_SECONDS = 300  # npm itself waits longer for a registry that does not answer

JAVA_LIBRARIES = (
    *("grpc-*", "protobuf", "guava", "failureaccess", "gson", "netty-*"),
    *("opencensus-*", "perfmark-api", "geronimo-annotation*"),
)

JAVA_PACKAGES = {
    "grpc-netty.jar": "libgrpc-java",
    "protobuf.jar": "libprotobuf-java",
    "guava.jar": "libguava-java",
    "gson.jar": "libgoogle-gson-java",
    "netty-transport.jar": "libnetty-java",
    "perfmark-api.jar": "libperfmark-java",
    "geronimo-annotation-1.3-spec.jar": "libgeronimo-annotation-1.3-spec-java",
}
"""Debian's packages of the libraries, by a file of each."""

COMPILER = "protobuf-compiler-grpc"


def python(address: str, folder: Path) -> Sequence[str | Path]:
    """The generated code is that of this repository."""
    return [sys.executable, EXAMPLES / "python" / "example.py", address]


def ruby(address: str, folder: Path) -> Sequence[str | Path]:
    """Generates code, and interprets."""
    tool("ruby", "ruby-grpc")
    generate("ruby", folder, CONTRACT)
    return ["ruby", "-I", folder, EXAMPLES / "ruby" / "example.rb", address]


def node(address: str, folder: Path) -> Sequence[str | Path]:
    """Installs the packages of the lock file; nothing is generated. Outside CI, the test is skipped if that fails."""
    program, npm, kept = tool("node", "nodejs"), tool("npm"), ROOT / "build" / "examples" / "node"

    def install() -> None:
        shutil.copytree(EXAMPLES / "node", kept)
        install = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        subprocess.run(install, cwd=kept, check=True, timeout=NPM_SECONDS)

    try:
        make_once(kept, [EXAMPLES / "node" / "package-lock.json"], install)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        missing("the npm registry does not answer")
    shutil.copytree(EXAMPLES / "node", kept, dirs_exist_ok=True)
    return [program, kept / "example.mjs", address, f"{ROOT / 'protos'}:{google_protos()[1]}", SERVICE_CONFIG]


def java(address: str, folder: Path) -> Sequence[str | Path]:
    """Generates code, and compiles it."""
    javac = tool("javac", "default-jdk-headless")
    if absent := [package for jar, package in JAVA_PACKAGES.items() if not (JARS / jar).exists()]:
        missing("jars are missing", *absent)
    plugin = tool("grpc_java_plugin", "protobuf-compiler-grpc-java-plugin")
    generate("java", folder, CONTRACT, *DETAILS, plugin=plugin)
    classpath = ":".join(str(jar) for name in JAVA_LIBRARIES for jar in JARS.glob(f"{name}.jar"))
    sources = [EXAMPLES / "java" / "Example.java", *folder.rglob("*.java")]
    run(javac, "-d", folder / "classes", "-proc:none", "-nowarn", "-classpath", classpath, *sources)
    return ["java", "-classpath", f"{folder / 'classes'}:{classpath}", "Example", address, SERVICE_CONFIG]


def cpp(address: str, folder: Path) -> Sequence[str | Path]:
    """Generates code, compiles it and links it."""
    compiler = tool("g++")
    flags = subprocess.run(
        [tool("pkg-config", "pkgconf"), "--cflags", "--libs", "grpc++", "protobuf"],
        capture_output=True,
        text=True,
    )
    if flags.returncode != 0:
        missing("there is no grpc++.pc, or no protobuf.pc", "libgrpc++-dev", "libprotobuf-dev")
    generate("cpp", folder, CONTRACT, *DETAILS)
    program = folder / "example"
    sources = [EXAMPLES / "cpp" / "example.cc", *folder.rglob("*.cc")]
    run(compiler, "-std=c++17", "-O0", "-I", folder, *sources, "-o", program, *flags.stdout.split())
    return [program, address, SERVICE_CONFIG]


def go(address: str, folder: Path) -> Sequence[str | Path]:
    """Generates code, and compiles it with Debian's packages. What is compiled of these is kept."""
    compiler = tool("go", "golang-go")
    if not (GO_PACKAGES / "src/google.golang.org/grpc").exists():
        missing("there is no google.golang.org/grpc", "golang-google-grpc-dev")
    protoc = tool("protoc", COMPILER)
    tool("protoc-gen-go", "protoc-gen-go-1-5")
    tool("protoc-gen-go-grpc", "protoc-gen-go-grpc")
    sources, program = folder / "src", folder / "example"
    sources.mkdir()
    run(protoc, *proto_paths(), f"--go_out={sources}", f"--go-grpc_out={sources}", CONTRACT)
    environment = {"GO111MODULE": "off", "GOPATH": f"{folder}:{GO_PACKAGES}", "GOFLAGS": ""}
    environment["GOCACHE"] = str(ROOT / "build" / "examples" / "go")
    run(compiler, "build", "-o", program, EXAMPLES / "go" / "example.go", environment=os.environ | environment)
    return [program, address, SERVICE_CONFIG]


LANGUAGES = {"python": python, "ruby": ruby, "node": node, "java": java, "cpp": cpp, "go": go}
"""Functions that build an example in a new folder, and return the command that runs it against a gateway."""


def google_protos() -> tuple[Path, Path]:
    """The folders of google/protobuf and of google/rpc."""
    return Path(str(resources.files("grpc_tools"))) / "_proto", Path(google.rpc.__path__[0]).parents[1]


def generate(language: str, folder: Path, *protos: str, plugin: str | None = None) -> None:
    """Generates messages and stubs with Debian's protoc, whose code fits Debian's libraries."""
    protoc = tool("protoc", COMPILER)
    plugin = plugin or tool(f"grpc_{language}_plugin", COMPILER)
    out = [f"--{language}_out={folder}", f"--grpc_out={folder}", f"--plugin=protoc-gen-grpc={plugin}"]
    run(protoc, *proto_paths(), *out, *protos)


def proto_paths() -> list[str]:
    """protoc's flags for the folders of all protos."""
    return [f"--proto_path={path}" for path in (ROOT / "protos", *google_protos())]


def run(*command: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Runs a step of a build, in another environment if one is given. If it fails, so does the test."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode != 0:
        pytest.fail(f"{command[0]}: {done.stdout}{done.stderr}")
