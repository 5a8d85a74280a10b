"""Kernels compile for GPUs that are not there, within their limits, and none is compiled while a worker serves."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from benchmarks.aot.table import TABLE
from large import large_but

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "kernels"

RunModule: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


class Mutant(NamedTuple):
    """`old`, which the file has exactly once, becomes `new`; the command then reports `fault`."""

    file: str
    old: str
    new: str
    command: tuple[str, ...]
    fault: str


def compiling(target: str, case: str) -> tuple[str, ...]:
    return ("benchmarks.aot", "--targets", target, "--only", case)


STAGES = '"num_stages": 5 if fits else 3'
DECODE = "decode: SmolLM2 135M, bf16"
MUTANTS = {
    "products in float32": Mutant(
        "invariant_linear.py",
        "tl.dot(b_inputs, tl.trans(b_weight), b_sum",
        "tl.dot(b_inputs.to(tl.float32), tl.trans(b_weight.to(tl.float32)), b_sum",
        compiling("sm_90", "invariant product: 4096 to 6144, bf16"),
        "has no tensor-core instructions",
    ),
    "too large a tile of keys": Mutant(
        "_attend.py",
        "else 8192",
        "else 65536",
        compiling("sm_86", "decode: Gemma 2 9B, bf16"),
        "bytes of shared memory of 101376",
    ),
    "too large a tile of queries": Mutant(
        "_attend.py",
        "while 2 * rows * tile_d",
        "while 1 * rows * tile_d",
        compiling("sm_86", "prefill: Gemma 2 9B, bf16"),
        "bytes of shared memory of 101376",
    ),
    "too many stages": Mutant(
        "_attend.py",
        STAGES,
        '"num_stages": 12',
        compiling("sm_86", DECODE),
        "bytes of shared memory of 101376",
    ),
    "more programs than fit": Mutant(
        "decode_plan.py",
        "_REGISTERS, _MOST_REGISTERS, _FP32_REGISTERS = 168, 255, 80",
        "_REGISTERS, _MOST_REGISTERS, _FP32_REGISTERS = 96, 255, 80",
        compiling("sm_90", "decode: Gemma 2 9B, bf16, KV int8"),
        "programs that wait for others to end",
    ),
    "a single stage": Mutant(
        "_attend.py",
        STAGES,
        '"num_stages": 1',
        compiling("sm_90", DECODE),
        "has no asynchronous copies",
    ),
    "too few warps": Mutant(
        "_attend.py",
        '"num_warps": 8 if many else 4',
        '"num_warps": 2',
        compiling("sm_90", "prefill: SmolLM2 135M, bf16"),
        "bytes of registers, not 0",
    ),
    "queries whose alignment is not known": Mutant(
        "paged_attention.py",
        '"p_block_tables", "p_query_starts", "p_context_lens", "p_tiles"]',
        '"p_block_tables", "p_query_starts", "p_context_lens", "p_tiles", "p_query"]',
        compiling("sm_90", "prefill: Llama 3 8B, bf16"),
        "loads of 16 bits or fewer from global memory",
    ),
    "more work in a loop": Mutant(
        "_attend.py",
        "b_decay = tl.exp2(b_max - b_new_max)",
        "b_decay = tl.exp2(tl.sin(b_max - b_new_max))",
        compiling("sm_90", DECODE),
        "instructions in inner loops, not",
    ),
    "a kernel for each width of block tables": Mutant(
        "paged_decode.py",
        'do_not_specialize=["stride_table"],',
        "",
        ("benchmarks.aot.serving", "--steps", "40", "--no-graphs"),
        "compiled while serving: _decode_kernel",
    ),
}
QUICKEST = (
    "products in float32",
    "more programs than fit",
    "a single stage",
    "a kernel for each width of block tables",
)
"""One for most kinds of faults."""


@pytest.fixture(scope="module")
def run_module(tmp_path_factory: pytest.TempPathFactory) -> RunModule:
    """Runs a module with Triton's compiler, which the interpreter of the other tests rules out in this process."""
    cache = tmp_path_factory.mktemp("triton")

    def run(*command: str, kernels: Path = KERNELS) -> "subprocess.CompletedProcess[str]":
        folders = (kernels, *(ROOT / folder for folder in ("", "protos", "client")))
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TRITON_CACHE_DIR": str(cache)}
        return subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1700,
            check=False,
        )

    return run


def test_kernels_compile_within_the_limits_of_their_targets(run_module: RunModule) -> None:
    """All of them. Those whose digests are in the table are not compiled again: after a change of many, this takes a
    quarter of an hour, until `python -m benchmarks.aot --update` has written them.
    """
    ended = run_module("benchmarks.aot")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith(" 0 faults\n")


@pytest.mark.parametrize("target", large_but(["sm_90", "gfx942"], "sm_90"))
def test_the_table_has_what_the_compiler_makes(run_module: RunModule, tmp_path: Path, target: str) -> None:
    case, result = "store: Llama 3 8B, bf16, KV int8", json.loads(TABLE.read_text())
    (row,) = (one for one in result["kernels"] if (one["target"], one["case"]) == (target, case))
    others = [one for one in result["kernels"] if one is not row]
    table = tmp_path / "table.json"
    table.write_text(json.dumps(result | {"kernels": [*others, row | {"digest": "", "num_registers": 0}]}))
    options = ("--targets", target, "--only", case, "--output", str(table))
    for changes, num_new in ((["--update"], 1), ([], 0), (["--recompile"], 1)):
        ended = run_module("benchmarks.aot", *options, *changes)
        assert ended.stdout == f"1 kernels, {num_new} compiled now, 0 faults\n", ended.stdout + ended.stderr
    assert json.loads(table.read_text())["kernels"] == [*others, row]


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--no-graphs",), marks=pytest.mark.large),
        ("--deterministic", "--kv", "int8"),
        pytest.param(("--model", "qwen3_moe", "--kv", "fp8"), marks=pytest.mark.large),
        pytest.param(("--model", "gemma2"), marks=pytest.mark.large),
        pytest.param(("--model", "gemma4_text"), marks=pytest.mark.large),
        pytest.param(("--model", "deepseek_v2"), marks=pytest.mark.large),
        ("--model", "all", "--steps", "25"),
    ],
    ids=" ".join,
)
def test_no_kernel_is_compiled_while_a_worker_serves(run_module: RunModule, options: tuple[str, ...]) -> None:
    ended = run_module("benchmarks.aot.serving", "--steps", "150", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", large_but(MUTANTS, *QUICKEST))
def test_a_faulty_kernel_is_reported(run_module: RunModule, tmp_path: Path, name: str) -> None:
    mutant = MUTANTS[name]
    shutil.copytree(KERNELS / "quire_kernels", tmp_path / "quire_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "quire_kernels" / mutant.file
    source = file.read_text()
    assert source.count(mutant.old) == 1
    file.write_text(source.replace(mutant.old, mutant.new))

    ended = run_module(*mutant.command, kernels=tmp_path)

    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert mutant.fault in ended.stdout
