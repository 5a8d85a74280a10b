"""The recorded kernels of a step are those that the worker's forward pass launches."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]
PROGRAM = """
import json, sys
from benchmarks.gpu.random_model import TINY
from benchmarks.simulator.gpu_model.launches import TracedModel, step_of
model = TracedModel(TINY, "sm_90", 8, 16)
traces = [model.trace(step_of(lengths)) for lengths in ([(1, 20)] * 3, [(1, 20)] * 3 + [(9, 9)])]
assert all(t.layout_seconds > 0 and t.launch_seconds > 0 for t in traces)
print(json.dumps([model.weight_bytes, [[(l.name, l.num_bytes, l.operations) for l in t.launches] for t in traces]]))
"""


@pytest.fixture(scope="module")
def traced() -> tuple[int, list[list[tuple[str, int, int]]]]:
    """The bytes of the weights, and name, bytes and operations of each kernel of a decode and of a mixed step.

    The interpreter of the other tests would choose other launches: a process of its own.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folders = (ROOT / folder for folder in ("", "protos", "kernels", "client"))
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    weight_bytes, steps = json.loads(done.stdout)
    return weight_bytes, steps


def test_each_layer_has_ten_kernels_in_a_decode(traced: tuple[int, list[list[tuple[str, int, int]]]]) -> None:
    decode, mixed = (Counter(name for name, *_ in step) for step in traced[1])
    layers = 2
    for name in ("_rotary_store_kernel", "_decode_kernel", "_merge_kernel", "_activation_kernel"):
        assert decode[name] == mixed[name] == layers, name
    assert decode["linear"] == mixed["linear"] == 4 * layers
    assert decode["_row_norm_kernel"] == 2 * layers + 1
    assert (decode["_paged_attention_kernel"], mixed["_paged_attention_kernel"]) == (0, layers)
    assert decode["_pick_kernel"] == 1
    assert not any("measure" in name for name in decode)


def test_products_read_all_weights_and_multiply_with_each_token(
    traced: tuple[int, list[list[tuple[str, int, int]]]],
) -> None:
    weight_bytes, (decode, _) = traced
    products = [(num_bytes, operations) for name, num_bytes, operations in decode if name in ("linear", "mm")]
    assert sum(num_bytes for num_bytes, _ in products) > weight_bytes - 2 * (2 * 2 + 1) * 64
    inputs_by_outputs = 2 * ((64 + 2 * 32 + 64) * 64 + 3 * 64 * 96) + 96 * 64
    assert sum(operations for _, operations in products) == 2 * 3 * inputs_by_outputs
