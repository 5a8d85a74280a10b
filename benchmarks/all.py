"""Measures anew what the pages in docs/ show of older code, and writes the pages (`make bench-all`).

    [VLLM_VENV=ENVIRONMENT] python -m benchmarks.all [--list]

A result keeps a hash of the code that it was measured on (`benchmarks/record.py`). Results of the code as it stands are
left as they are, so the command can be stopped and goes on where it was. All of it takes hours. Benchmarks beside vLLM
run where VLLM_VENV names its environment; the one of a GPU has a command of its own.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.docs import PAGES, Section
from benchmarks.docs import main as write_pages
from benchmarks.processor import Processor
from benchmarks.record import ROOT, code_hash, read_result
from benchmarks.runner import log

_VLLM = "VLLM_VENV=ENVIRONMENT"
_ON_A_GPU = "gpu"


def outdated(code: str) -> Iterator[Section]:
    """The sections whose results are of other code than this, in the order of the pages, and that this processor can
    measure.
    """
    measurable = (None, Processor.this())
    for page in PAGES:
        for section in page.sections:
            is_older = (read_result(section.result) or {}).get("code") != code
            if is_older and section.name != _ON_A_GPU and section.processor in measurable:
                yield section


def command_of(section: Section) -> list[str] | None:
    """The command that measures a section; None: it needs vLLM, and VLLM_VENV names no environment."""
    words = shlex.split(section.command)
    if words[0] == _VLLM:
        if not os.environ.get("VLLM_VENV"):
            return None
        words = words[1:]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def main() -> None:
    """Exits with 1 where a benchmark failed; the others run nevertheless."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what would be measured")
    options = parser.parse_args()
    code = code_hash()
    if code is None:
        sys.exit("all: files differ from the last commit; figures must be of code that can be found again")
    failed = []
    for section in outdated(code):
        command = command_of(section)
        if command is None:
            log(f"{section.name}: left out, VLLM_VENV names no environment")
        elif options.list:
            print(section.name)
        else:
            log(f"{section.name}: {shlex.join(command)}")
            if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
                failed.append(section.name)
            write_pages()
    if failed:
        sys.exit(f"all: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
