"""Tensors that are unpacked are read without the file's pages, so that loading takes little more than the model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_gguf import TinyGguf, write_tiny_gguf
from worker_svc.gguf_conversion import GgufConversion
from worker_svc.model.tensor_bytes import TensorBytes

_MEASURE = """
import sys
from pathlib import Path
import torch
import compiled
from quire_kernels.cpu.linear import MatrixFormat
from worker_svc.attention import CompiledKernels
from worker_svc.model.architecture import describe
from worker_svc.model.compiled_model import load_compiled_model
from worker_svc.model.config import read_config

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

directory = Path(sys.argv[1])
kernels = CompiledKernels(compiled.thread_pool(1), MatrixFormat.W4A16)
description = describe(read_config(directory))
torch.ones(64, 64).bfloat16()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
model = load_compiled_model(description, directory, torch.bfloat16, kernels)
print(status("VmHWM") - before, status("VmRSS") - before)
"""


def test_the_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"a.blocks": torch.randint(0, 256, (3, 7), dtype=torch.uint8), "b.weight": torch.randn(5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = TensorBytes(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(read.read(name), tensor.flatten().view(torch.uint8))


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    read = TensorBytes(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OSError, match="ends within the tensor a"):
        read.read("a")


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process's memory")
def test_loading_takes_little_more_than_the_model(tmp_path: Path) -> None:
    """Of a model of 150 MB: with the pages of the file, the peak would be at twice that."""
    sizes = TinyGguf(hidden=1024, intermediate=4096, layers=8, stored=lambda _: "Q6_K")
    gguf = write_tiny_gguf(tmp_path / "large.gguf", sizes)
    (tmp_path / "model").mkdir()
    GgufConversion(gguf, tmp_path / "model", print).run(keeps_blocks=True)
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "model")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak, loaded = map(int, done.stdout.split())
    assert loaded > 90_000
    assert peak < 1.6 * loaded
