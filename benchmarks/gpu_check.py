"""Test and measure the Triton kernels on the GPU at hand, and write what was seen as one JSON file.

Needs torch, triton, numpy and pytest, and nothing of the project installed: `python benchmarks/gpu_check.py`.
Ends with 0 if all tests pass, 1 if not, 2 where there is no GPU. Takes some minutes, most of them to compile.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
# As in pyproject.toml, which pytest must not read here: it asks for plugins that may be missing.
PYTHON_PATH = [str(ROOT / folder) for folder in ("", "protos", "kernels", "client", "tests/support")]
TEST_FOLDERS = ("tests/kernels", "tests/gpu")
TEST_SECONDS = 480

# The shape of Llama 3 8B
NUM_KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
BLOCK_SIZE = 16


def run_tests() -> dict[str, Any]:
    """Run the tests that want a GPU in a process of their own, and count them."""
    folders = [folder for folder in TEST_FOLDERS if (ROOT / folder).is_dir()]
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", *folders, "-q", "--maxfail=20", "-c", os.devnull]
        command += [f"--rootdir={ROOT}", "-p", "no:cacheprovider", "--import-mode=importlib"]
        command += [f"--junitxml={report.name}"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(PYTHON_PATH), "PYTEST_ADDOPTS": ""}
        try:
            exit_code = subprocess.run(command, cwd=ROOT, env=environment, timeout=TEST_SECONDS).returncode
        except subprocess.TimeoutExpired:
            return {"folders": folders, "exit_code": 124, "timeout_s": TEST_SECONDS}
        suites = list(ElementTree.parse(report.name).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    counts = {name: sum(int(suite.attrib[name]) for suite in suites) for name in names}
    seconds = sum(float(suite.attrib["time"]) for suite in suites)
    return {"folders": folders, "exit_code": exit_code, **counts, "seconds": round(seconds, 1)}


def milliseconds(run: Any) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=500, return_mode="median"))


def measure_copy() -> dict[str, Any]:
    """The device's own rate of reading and writing 2 GiB, which bounds what decode can reach."""
    import torch

    source = torch.randint(255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = milliseconds(lambda: target.copy_(source))
    return {"bytes": 2 * source.nbytes, "ms": ms, "gb_per_s": 2 * source.nbytes / ms / 1e6}


def make_batch(num_seqs: int, num_queries: int, context_len: int) -> dict[str, Any]:
    """Arguments of `paged_attention` in bfloat16: sequences alike, pages scattered over one layer of a cache of two."""
    import torch

    num_pages = context_len // BLOCK_SIZE
    shape = (num_seqs * num_pages, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    num_tokens = num_seqs * num_queries
    return {
        "query": torch.randn(num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM, dtype=torch.bfloat16, device="cuda"),
        "key_cache": cache[:, 1, 0],
        "value_cache": cache[:, 1, 1],
        "block_tables": torch.randperm(len(cache), device="cuda").int().view(num_seqs, num_pages),
        "query_starts": torch.arange(0, num_tokens + 1, num_queries, dtype=torch.int32, device="cuda"),
        "context_lens": torch.full((num_seqs,), context_len, dtype=torch.int32, device="cuda"),
        "max_query_len": num_queries,
        "scale": HEAD_DIM**-0.5,
    }


def measure_decode(num_seqs: int, context_len: int) -> dict[str, Any]:
    """How fast the keys and values of a batch are read, which is what decode does."""
    from quire_kernels.paged_attention import paged_attention

    batch = make_batch(num_seqs, 1, context_len)
    size = 2 * num_seqs * context_len * NUM_KV_HEADS * HEAD_DIM * batch["key_cache"].element_size()
    ms = milliseconds(lambda: paged_attention(**batch))
    return {"num_seqs": num_seqs, "context_len": context_len, "ms": ms, "gb_per_s": size / ms / 1e6}


def measure_prefill(context_len: int) -> dict[str, Any]:
    """One whole prompt over pages, beside torch's fused attention over plain tensors of the same values."""
    from torch.nn.functional import scaled_dot_product_attention

    from quire_kernels.paged_attention import paged_attention

    batch = make_batch(1, context_len, context_len)

    def plain(cache: Any) -> Any:
        return cache[batch["block_tables"][0].long()].transpose(0, 1).flatten(1, 2)[None].contiguous()

    query = batch["query"].transpose(0, 1)[None].contiguous()
    key, value = plain(batch["key_cache"]), plain(batch["value_cache"])

    def sdpa() -> Any:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    expected = sdpa()[0].transpose(0, 1).double()
    error = (paged_attention(**batch).double() - expected).norm() / expected.norm()
    operations = 2 * context_len**2 * NUM_KV_HEADS * GROUP * HEAD_DIM  # causal: half of 4 n^2 d
    ms, sdpa_ms = milliseconds(lambda: paged_attention(**batch)), milliseconds(sdpa)
    return {
        "context_len": context_len,
        "ms": ms,
        "tflop_per_s": operations / ms / 1e9,
        "sdpa_ms": sdpa_ms,
        "sdpa_tflop_per_s": operations / sdpa_ms / 1e9,
        "relative_error": error.item(),
    }


def commit() -> str | None:
    """The commit that is checked out, None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_check.json", help="file to write")
    out: Path = parser.parse_args().out

    import torch

    if not torch.cuda.is_available():
        print("gpu_check: torch finds no GPU on this machine", file=sys.stderr)
        return 2
    import triton

    sys.path[:0] = PYTHON_PATH
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "tests": run_tests(),
    }
    if report["tests"]["exit_code"] == 0:
        copy, decode = measure_copy(), measure_decode(num_seqs=32, context_len=4096)
        decode["of_copy_rate"] = decode["gb_per_s"] / copy["gb_per_s"]
        shape = {"num_kv_heads": NUM_KV_HEADS, "group": GROUP, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
        report["shape"] = {**shape, "dtype": "bfloat16"}
        report |= {"copy": copy, "decode": decode, "prefill": measure_prefill(context_len=4096)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0 if report["tests"]["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
