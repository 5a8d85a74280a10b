"""Measures each op beside its peers on the same tensors, and beside the device's own rates.

    python -m benchmarks.kernels [--only decode] [--skip store] [--skip-peers compile,Flex] [--dry-run] [--output FILE]

On a GPU the Triton ops, on a CPU the CPU's. With `--dry-run` the Triton ops at small sizes, on a CPU too. Needs torch,
triton and numpy. The file is written after each case, so that a hang or a crash loses no other case.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.device import DeviceRates
from benchmarks.kernels.report import judge, kernels_table
from benchmarks.record import RESULTS, ROOT, describe_gpu, provenance, write_result


def cases_for(device: torch.device, *, dry_run: bool = False) -> Sequence[partial[KernelCase]]:
    """The cases of the device's kind. Each imports its op when it is made."""
    if dry_run:
        from benchmarks.kernels import small_table

        return small_table.CASES
    if device.type == "cuda":
        from benchmarks.kernels import gpu_table

        return gpu_table.CASES
    from benchmarks.kernels import cpu_table

    return cpu_table.cases()


def main() -> int:
    """The exit status: 1 where an op could not run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    default = RESULTS / f"kernels{'_gpu' if device.type == 'cuda' else ''}.json"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose op or shape holds this text")
    parser.add_argument("--skip", default="\n", help="cases whose op or shape holds this text are left out")
    parser.add_argument("--dry-run", action="store_true", help="small sizes of the GPU's cases, without a GPU too")
    parser.add_argument(
        "--skip-peers", default="", help="peers whose names hold one of these texts; compiling some takes long"
    )
    parser.add_argument("--output", type=Path, default=default, help=f"file for the result; default {default.name}")
    options = parser.parse_args()
    if options.dry_run and device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.insert(0, str(ROOT / "kernels"))  # where the project is not installed
    torch.manual_seed(0)
    rates = DeviceRates.measure(device)
    result: dict[str, Any] = {
        **provenance("torch", "triton", "flashinfer-python", "flash-attn"),
        "gpu": describe_gpu(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "rates": rates.to_json(),
        "cases": [],
    }
    for make in cases_for(device, dry_run=options.dry_run):
        try:
            case = make(device)
        except Exception as error:  # no compiler, no such op, no memory: recorded, and the next case runs
            about = {"op": make.func.__name__, "shape": str(make.keywords), "peers": {}}
            result["cases"].append(about | {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
            continue
        described = f"{case.op} {case.shape}"
        if options.only in described and options.skip not in described:
            skipped = [text for text in options.skip_peers.split(",") if text]
            peers = {name: run for name, run in case.peers.items() if not any(text in name for text in skipped)}
            result["cases"].append(replace(case, peers=peers).measure(device, rates))
            print(f"{case.op}, {case.shape}: {result['cases'][-1].get('ms')} ms", file=sys.stderr, flush=True)
        del case
        if device.type == "cuda":
            torch.cuda.empty_cache()
        result["targets"] = judge(result)
        write_result(options.output, result)
    print(kernels_table(result).markdown())
    print(f"written to {os.path.relpath(options.output)}", file=sys.stderr)
    return 1 if any("error" in case for case in result["cases"]) else 0


if __name__ == "__main__":
    sys.exit(main())
