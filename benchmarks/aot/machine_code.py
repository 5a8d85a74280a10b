"""What a compiled kernel says of itself: its registers, shared memory, spills and instructions."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SASS_LABEL = re.compile(r"^(\.L_x_\d+):")
_SASS_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")
_SASS_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_GCN_LABEL = re.compile(r"^(\.L\w+):")
_GCN_INSTRUCTION = re.compile(r"^\s+([a-z]\w+(?:\s.*)?)$")
_GCN_BRANCH = re.compile(r"^s_c?branch\w*\s+(\.L\w+)")
_STACK_ALIGNMENT = 8
# Products of matrices by special units: HMMA, HGMMA and UTCHMMA of NVIDIA, also with other types of operands.
_SASS_MATRIX = re.compile(r"\b(?:[HIQ]G?MMA|OMMA|UTC[HIQO]MMA)\b")
_GCN_MATRIX = re.compile(r"^v_(?:mfma|smfmac)_")
# Copies from global to shared memory that a thread does not wait for.
_SASS_ASYNC = re.compile(r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b")
# Loads of 16 bits or fewer from global memory: rows of numbers in 16 bits have none where their alignment is known.
_SASS_NARROW = re.compile(r"\bLDG\.\S*[US](?:8|16)\b")
_GCN_NARROW = re.compile(
    r"^(?:global|flat|buffer)_load_(?:[us]byte|[us]short|short_d16|[us]byte_d16|[ui](?:8|16)|d16_)"
)
_GCN_ASYNC = re.compile(r"^(?:global_load_lds|buffer_load\w*.*\blds\b)")


@dataclass(frozen=True)
class Figures:
    """Registers and spilled bytes are of one thread, shared bytes of one program. `num_loop_instructions` counts the
    instructions of innermost loops, `num_narrow_loads` loads of 16 bits or fewer from global memory.
    """

    num_registers: int
    spill_bytes: int
    shared_bytes: int
    num_matrix_instructions: int
    num_async_copies: int
    num_loop_instructions: int
    num_narrow_loads: int


def figures_of(kernel: Any) -> Figures:
    """The figures of a kernel that Triton compiled, from its machine code."""
    if "cubin" in kernel.asm:
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = _output("cuobjdump", "--dump-resource-usage", file.name)
            code, labels = _parse(_output("nvdisasm", "-c", file.name), _SASS_LABEL, _SASS_INSTRUCTION)
        registers = _number(r"\bREG:(\d+)", usage)
        spill = _spilled(_number(r"\bSTACK:(\d+)", usage), kernel.asm["ptx"])
        matrix, copies, branch, narrow = _SASS_MATRIX, _SASS_ASYNC, _SASS_BRANCH, _SASS_NARROW
    else:
        assembly = kernel.asm["amdgcn"]
        code, labels = _parse(assembly, _GCN_LABEL, _GCN_INSTRUCTION)
        registers = _number(r"\.vgpr_count:\s+(\d+)", assembly)
        spill = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", assembly)
        matrix, copies, branch, narrow = _GCN_MATRIX, _GCN_ASYNC, _GCN_BRANCH, _GCN_NARROW
    return Figures(
        registers,
        spill,
        kernel.metadata.shared,
        sum(matrix.search(line) is not None for line in code),
        sum(copies.search(line) is not None for line in code),
        sum(end - begin for begin, end in _innermost_loops(code, labels, branch)),
        sum(narrow.search(line) is not None for line in code),
    )


def _spilled(stack_bytes: int, ptx: str) -> int:
    """What a stack holds besides the arrays of the PTX: those of `sin` and `cos` for large angles."""
    arrays = sum(int(size) for size in re.findall(r"\.local [^;]*\[(\d+)\];", ptx))
    return max(0, stack_bytes - -(-arrays // _STACK_ALIGNMENT) * _STACK_ALIGNMENT)


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"{pattern} is not in the description of a kernel")
    return int(match[1])


def _parse(text: str, label: re.Pattern[str], instruction: re.Pattern[str]) -> tuple[list[str], dict[str, int]]:
    """The instructions, and for each label the place of the instruction that follows it."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := label.match(line):
            labels[match[1]] = len(code)
        elif match := instruction.match(line):
            code.append(match[1])
    return code, labels


def _innermost_loops(code: Sequence[str], labels: dict[str, int], branch: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Ranges of instructions that a branch back repeats, and that contain no other. A branch to itself, which ends the
    code of NVIDIA's kernels, is none.
    """
    loops = set()
    for place, line in enumerate(code):
        match = branch.search(line)
        begin = len(code) if match is None else labels.get(match[1], len(code))
        if begin < place:
            loops.add((begin, place + 1))
    for begin, end in loops:
        if not any((begin, end) != other and begin <= other[0] and other[1] <= end for other in loops):
            yield begin, end
