"""Predicts what a GPU takes for kernels and steps, and compares that with what `make gpu-check` measured.

    python -m benchmarks.simulator.gpu_model [--compare FILE] [--output FILE]

No GPU is needed. The real forward pass of a model of Llama 3 8B's shape runs on meta tensors; each kernel that it
launches takes as long as its bytes or its operations at the GPU's rates. Attention is computed from its plan and its
machine code, in the table of kernels compiled ahead of time. With `--compare` the predictions stand beside the result
of `make gpu-check`, twice: at the assumed rates, and at the rates of copies and products that were measured there.
Nothing is written then.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import RESULTS, provenance, read_result, write_result
from benchmarks.simulator.gpu_model.hardware import H100

RESULT = RESULTS / "gpu_model.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, help="a result of make gpu-check")
    parser.add_argument("--output", type=Path, default=RESULT, help="default %(default)s")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is 1: the interpreter chooses other launches than a GPU")
    # Here, because they import Triton
    from benchmarks.simulator.gpu_model.predictions import predict
    from benchmarks.simulator.gpu_model.report import comparison, gpu_model_section

    if options.compare is None:
        result = provenance("triton", "torch") | predict(H100)
        write_result(options.output, result)
        print(gpu_model_section(result))
        return 0
    measured = read_result(options.compare)
    if measured is None:
        parser.error(f"--compare: there is no {options.compare}")
    print(f"measured on {(measured.get('gpu') or {}).get('name', 'no GPU')}")
    rates = measured.get("decode", {}).get("rates") or measured.get("kernels", {}).get("rates")
    for hardware in (H100, *([H100.with_rates(rates)] if rates else [])):
        print(f"\npredicted for {hardware.name}, {hardware.origin}")
        for table in comparison(predict(hardware), measured):
            print(f"\n{table.markdown()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
