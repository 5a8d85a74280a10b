"""Compiles every Triton kernel ahead of time, for GPUs that need not be there (`make aot`).

    python -m benchmarks.aot [--targets sm_90,gfx942] [--only TEXT] [--recompile] [--update] [--output FILE]

Kernels whose source, types, constants and options are those of a row of the table have its figures, and are not
compiled again, except with `--recompile`: after a change of how figures are read from machine code, use it.

Fails with status 1 if a kernel does not compile, uses more shared memory than its target has, spills more registers
than its target allows, lacks tensor-core instructions or asynchronous copies, has more loads of single numbers of 16
bits than in the table, other inner loops, or no row in it; and if there is a kernel that no case launches.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import triton

from benchmarks.aot.compiling import compile_target, faults, uncompiled
from benchmarks.aot.table import known_figures, read_rows, table_of, write_table
from benchmarks.aot.targets import TARGETS
from benchmarks.record import ROOT

CACHE = ROOT / "build" / "aot"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="of %(default)s")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--recompile", action="store_true", help="compile also what has not changed")
    parser.add_argument("--update", action="store_true", help="write the rows to the table, instead of comparing them")
    parser.add_argument(
        "--output", type=Path, default=table_of(triton.__version__), help="the table; default %(default)s"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is 1: the interpreter compiles nothing")
    names = options.targets.split(",")
    if unknown := set(names) - set(TARGETS):
        parser.error(f"--targets: there is no {', '.join(sorted(unknown))}, only {', '.join(TARGETS)}")
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))
    rows = read_rows(options.output, triton.__version__)
    known = {} if options.recompile else known_figures(rows)
    work = partial(compile_target, only=options.only, known=known)
    # Processes of their own: a driver is a global of Triton.
    with ProcessPoolExecutor(min(options.processes, len(names)), mp_context=get_context("spawn")) as pool:
        compiled = [kernel for kernels in pool.map(work, names) for kernel in kernels]
    table = {} if options.update else rows
    num_faults = 0
    for name in uncompiled([*(kernel.kernel for kernel in compiled), *(kernel for _, _, kernel in rows)]):
        print(f"{name}: no case launches it")
        num_faults += 1
    for kernel in compiled:
        for fault in faults(TARGETS[kernel.target], kernel, table, of_all=not (options.only or options.update)):
            print(f"{kernel.target}, {kernel.case}, {kernel.kernel}: {fault}")
            num_faults += 1
    if options.update:
        write_table(options.output, compiled, names, options.only)
    print(f"{len(compiled)} kernels, {sum(kernel.is_new for kernel in compiled)} compiled now, {num_faults} faults")
    return 1 if num_faults or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
