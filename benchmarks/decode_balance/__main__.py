"""How busy decodes of ragged contexts keep a GPU, by a model of its waves of programs; no GPU is needed.

    python -m benchmarks.decode_balance [--output FILE]

A GPU runs as many programs of a launch at the same time as fit it, and starts another one where one ends. In the model
a program takes a unit of time for each tile of keys, and one for each start of an item; the merge of parts takes one
more at the end. The plan of `quire_kernels.decode_plan` is compared with even splits: as many for each sequence, chosen
by the number of sequences and the model's context, as in FlashAttention 2. How many programs fit comes from the table
of compiled kernels (`make aot`). Fails with status 1 if a target is missed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.decode_balance.waves import measure_all
from benchmarks.record import RESULTS, provenance, write_result
from benchmarks.report import target_list

RESULT = RESULTS / "decode_balance.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT, help="default %(default)s")
    options = parser.parse_args(arguments)
    result = measure_all()
    write_result(options.output, provenance("triton", "torch") | result)
    for row in result["rows"]:
        print(f"{row['target']}, {row['contexts']}: {row['even_splits']:.0%}, by the plan {row['planned']:.0%}")
    print(target_list(result))
    return 0 if all(one["holds"] for one in result["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
