"""Compares every op with a reference, and tokens by CUDA graphs with those of transformers.

    python -m benchmarks.gpu.correct [--dry-run] [--only sample] [--processes 4] [--output FILE]

Attention is compared in bfloat16 with keys and values in 16 bits, float8_e4m3fn and int8. The tokens are of the default
model where its files are on the machine, else of a small random one. The file is written after each check. Exits with 1
if one fails. Several processes share the checks, which take most of their time to compile kernels. With `--dry-run` the
sizes are small, and on a CPU Triton's interpreter runs the kernels.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.op_call import name_of
from benchmarks.gpu.op_calls import op_calls
from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.pages import Heads
from benchmarks.record import RESULTS, describe_gpu, provenance, write_result

# Relative, by the norm: of attention in 16 bits for each token and head, of other ops for the whole result.
ATTENTION_ERROR, OP_ERROR = 1e-2, 1e-2
# Of keys and values that are stored in 8 bits, against those in 16
CACHE_DTYPES = (None, torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class Check:
    """A comparison: its error, which must be at most the bound. An error of 0 and 1 is agreement of whole results."""

    name: str
    error: Callable[[], float]
    bound: float = 0.0

    def run(self) -> dict[str, Any]:
        """As a row of the result; an exception is recorded, so that the other checks run."""
        began = time.monotonic()
        try:
            with torch.inference_mode():
                error = self.error()
            outcome: dict[str, Any] = {"error": error, "holds": error <= self.bound}
        except Exception as failure:
            lines = str(failure).strip().splitlines() or [""]
            outcome = {"failure": f"{type(failure).__name__}: {lines[0]}"[:300], "holds": False}
        return {"name": self.name, "bound": self.bound} | outcome | {"seconds": round(time.monotonic() - began, 2)}


def all_checks(device: torch.device, *, small: bool) -> Iterator[Check]:
    """The checks, from those that most depends on."""
    yield from _attention_checks(device, small)
    yield from _sampling_checks(device, small)
    yield Check("tokens by graphs and by transformers", partial(_token_difference, device, small))
    yield from _op_checks(device, small)


def _attention_checks(device: torch.device, small: bool) -> Iterator[Check]:
    dtype = _products(device)
    heads, head_dim = ((2, 2), 64) if small else ((8, 4), 128)
    contexts = (1, 17, 33) if small else (1, 15, 16, 17, 63, 64, 65, 127, 129, 1000, 4097)
    for cache_dtype in CACHE_DTYPES:
        name = f"{name_of(dtype)}, keys and values in {name_of(cache_dtype or dtype)}"
        how = {"dtype": dtype, "cache_dtype": cache_dtype, "device": device.type}
        yield Check(f"decode: {name}", partial(_decode_error, contexts, heads, head_dim, how), ATTENTION_ERROR)
        yield Check(f"prefill: {name}", partial(_prefill_error, contexts, heads, head_dim, how), ATTENTION_ERROR)


def _decode_error(contexts: tuple[int, ...], heads: tuple[int, int], head_dim: int, how: dict[str, Any]) -> float:
    from paged_batches import make_batch
    from quire_kernels.paged_decode import paged_decode, paged_decode_reference

    arguments = make_batch([(1, context) for context in contexts], heads, head_dim, **how).decode_arguments()
    return _largest_error(paged_decode(**arguments), paged_decode_reference(**arguments))


def _prefill_error(contexts: tuple[int, ...], heads: tuple[int, int], head_dim: int, how: dict[str, Any]) -> float:
    from paged_batches import make_batch
    from quire_kernels.paged_attention import paged_attention, paged_attention_reference

    arguments: dict[str, Any] = make_batch(
        [(min(context, 1 + (37 * context) % 140), context) for context in contexts], heads, head_dim, **how
    ).tiled_arguments()
    return _largest_error(paged_attention(**arguments), paged_attention_reference(**arguments))


def _largest_error(actual: Tensor, expected: Tensor) -> float:
    """Of the last dimensions."""
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1).clamp_min(1e-30)).max())


def _sampling_checks(device: torch.device, small: bool) -> Iterator[Check]:
    vocab_size = 300 if small else 128256
    # With probabilities of 1e-5, rounding in float32 sometimes selects a neighbouring token.
    yield Check("sample", partial(_sampled_difference, device, vocab_size), 0.05)
    yield Check("sample_greedy", partial(_greedy_difference, device, vocab_size))


def _sampled_difference(device: torch.device, vocab_size: int) -> float:
    from quire_kernels.sample import SamplingTensors, sample, sample_reference

    rows = 48
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    rows_of = torch.arange(rows)
    sampling = SamplingTensors(
        temperature=(0.5 + 0.5 * (rows_of % 3)).float(),
        top_k=(20 * (rows_of % 4 == 1)).int(),
        top_p=torch.where(rows_of % 4 == 2, 0.9, 1.0).double(),
        min_p=torch.where(rows_of % 4 == 3, 0.1, 0.0).float(),
        seeds=rows_of,
        indices=rows_of.int(),
        positions=rows_of.int(),
    )
    moved = SamplingTensors(*(getattr(sampling, name).to(device) for name in SamplingTensors.__dataclass_fields__))
    logits = logits.to(device)
    return float((sample(logits, moved) != sample_reference(logits, moved)).double().mean())


def _greedy_difference(device: torch.device, vocab_size: int) -> float:
    from quire_kernels.sample_greedy import sample_greedy, sample_greedy_reference

    logits = torch.randn(17, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    logits[3, 5] = float("nan")
    ours, expected = (torch.empty(17, dtype=torch.int64, device=device) for _ in range(2))
    sample_greedy(logits, ours)
    sample_greedy_reference(logits, expected)
    return float((ours != expected).double().mean())


def _token_difference(device: torch.device, small: bool) -> float:
    """The share of tokens that differ, in float32: prompts in chunks beside decodes, a step launched ahead."""
    import llama_models
    from runner_driver import Driver, make_runner

    default = None if small else _default_model()
    lengths, num_tokens = ((1, 17), 3) if small else ((1, 15, 16, 17, 33, 64), 24)
    prompts = llama_models.prompts(*lengths)
    with TemporaryDirectory(prefix="quire-gpu-model-") as folder:
        directory = default or llama_models.save_model(Path(folder), llama_models.VARIANTS["llama"]())
        torch.backends.cuda.matmul.allow_tf32 = False
        runner = make_runner(
            directory, "triton", device=device.type, cuda_graphs=True, max_sequences=len(prompts), num_blocks=256
        )
        found = Driver(runner, chunk=8, ahead=1).generate(prompts, num_tokens)
        expected = llama_models.generate(directory, prompts, num_tokens, device.type)
    pairs = [pair for ours, theirs in zip(found, expected, strict=True) for pair in zip(ours, theirs, strict=True)]
    return sum(ours != theirs for ours, theirs in pairs) / len(pairs)


def _default_model() -> Path | None:
    """The default model's directory, if `python -m worker_svc.prepare` has made it here."""
    from svc_common.models import find_source

    directory = find_source(None).directory()
    return directory if directory is not None and (directory / "model.safetensors").is_file() else None


def _op_checks(device: torch.device, small: bool) -> Iterator[Check]:
    """Ops beside torch's, as `benchmarks.kernels` measures them, and the others beside their references. The GPU tests
    compare all in many more cases.
    """
    from benchmarks.kernels import elementwise, invariant

    heads = Heads(2, 2, 64) if small else Heads(8, 4, 128)
    num_tokens, width, vocab_size = (3, 64, 300) if small else (70, 4096, 128256)
    cases: dict[str, tuple[partial[KernelCase], float]] = {
        "rotary_store": (partial(elementwise.rotary, heads=heads, num_tokens=num_tokens), OP_ERROR),
        "embed_tokens": (partial(elementwise.embed, num_tokens=num_tokens, vocab_size=300, width=width), OP_ERROR),
        "gated_activation": (partial(elementwise.activation, num_tokens=num_tokens, width=width), OP_ERROR),
        "plain_activation": (partial(elementwise.gelu, num_tokens=num_tokens, width=width), OP_ERROR),
        "log_norms": (partial(invariant.norms, num_rows=num_tokens, vocab_size=vocab_size), 1e-5),
        "invariant_linear": (
            partial(invariant.product, num_rows=num_tokens, inputs=width, outputs=width, dtype=_products(device)),
            OP_ERROR,
        ),
    }
    for name, (make, bound) in cases.items():
        yield Check(name, partial(_peer_difference, make, device), bound)
    for call in op_calls(device, _products(device), small=small):
        yield Check(call.name, call.error, call.bound)


def _peer_difference(make: partial[KernelCase], device: torch.device) -> float:
    """The relative error against torch. Raises ValueError where the two have not the same shape."""
    case = make(device)
    ours, theirs = case.ours(), case.peers["torch"]()
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor) or ours.shape != theirs.shape:
        raise ValueError("the op and torch's have no results of one shape")
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


def _products(device: torch.device) -> torch.dtype:
    """What products are checked in: the interpreter computes those of bfloat16 wrongly."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16


def _chosen(small: bool, only: str) -> list[Check]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [check for check in all_checks(device, small=small) if only in check.name]


def _run_check(number: int, small: bool, only: str) -> dict[str, Any]:
    """The row of one check. For a process of its own."""
    return _chosen(small, only)[number].run()


def _rows(small: bool, only: str, num_processes: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the row of each check, as they end."""
    checks = _chosen(small, only)
    if num_processes == 1:
        yield from enumerate(check.run() for check in checks)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        numbers = {pool.submit(_run_check, number, small, only): number for number in range(len(checks))}
        for future in as_completed(numbers):
            check, error = checks[numbers[future]], future.exception()
            if error is None:
                yield numbers[future], future.result()
            else:  # the process has ended, and with it those of all checks that are left
                yield (
                    numbers[future],
                    {"name": check.name, "bound": check.bound, "failure": repr(error), "holds": False},
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small sizes, without a GPU too")
    parser.add_argument("--only", default="", help="checks whose name holds this text")
    parser.add_argument("--processes", type=int, default=4 if torch.cuda.is_available() else 1)
    parser.add_argument("--output", type=Path, default=RESULTS / "correct_gpu.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        if not options.dry_run:
            parser.error("torch finds no GPU on this machine: --dry-run")
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    result: dict[str, Any] = {**provenance("torch", "triton", "transformers"), "gpu": describe_gpu(), "checks": []}
    rows: dict[int, dict[str, Any]] = {}
    for number, row in _rows(options.dry_run, options.only, options.processes):
        rows[number] = row
        result["checks"] = [rows[number] for number in sorted(rows)]
        print(f"{row['name']}: {row.get('failure') or row['error']}", file=sys.stderr, flush=True)
        write_result(options.output, result)
    return 0 if result["checks"] and all(row["holds"] for row in result["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
