"""Generates the contracts' code beside their protos; with --check, compares it and fails where it differs."""

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> set[Path]:
    """Writes messages, services and the stubs of both below `out`. Returns the files, relative to it."""
    protos = sorted(path.relative_to(ROOT) for path in ROOT.glob("quire/*/v*/*.proto"))
    # It stands beside this Python, which need not be on the PATH.
    plugin = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
    status = protoc.main(
        [
            "protoc",
            f"--plugin=protoc-gen-mypy_grpc={plugin}",
            f"--proto_path={ROOT}",
            f"--proto_path={resources.files('grpc_tools') / '_proto'}",
            *(f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")),
            f"--mypy_grpc_out=quiet:{out}",
            *map(str, protos),
        ]
    )
    if status != 0:
        raise SystemExit(status)
    return {proto.with_name(proto.stem + suffix) for proto in protos for suffix in SUFFIXES}


def differences(fresh: Path, files: set[Path]) -> list[Path]:
    """Generated files that are missing, out of date, or left over from a proto that is gone."""
    standing = {path.relative_to(ROOT) for suffix in SUFFIXES for path in ROOT.rglob(f"*{suffix}")}
    changed = {file for file in files & standing if (ROOT / file).read_bytes() != (fresh / file).read_bytes()}
    return sorted(changed | (files ^ standing))


def main() -> None:
    """Generate, or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where generated code differs")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        different = differences(fresh, generate(fresh))
    for file in different:
        print(f"protos/{file} is not what its proto generates: run `make protos`", file=sys.stderr)
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
