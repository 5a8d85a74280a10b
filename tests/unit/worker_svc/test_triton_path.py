"""The runner end to end with the Triton kernels in Triton's interpreter."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import runner_driver

DRIVER = Path(runner_driver.__file__)
NUM_TOKENS = 3  # a prompt of a whole block continues in the next one


def test_triton_kernels_generate_what_transformers_does(
    tiny_llama: Path, reference: Callable[[Path, list[list[int]], int], list[list[int]]]
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(97) for _ in range(length)] for length in (1, 16, 19)]
    # The interpreter is chosen when a kernel's module is imported, for the life of the process.
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tiny_llama), "triton", json.dumps(prompts), str(NUM_TOKENS)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == reference(tiny_llama, prompts, NUM_TOKENS)
