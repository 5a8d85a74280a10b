"""What `make gpu-check` is predicted to measure: the same kernels and steps, with a model of Llama 3 8B's shape."""

from collections.abc import Sequence
from typing import Any

from benchmarks.decode_balance.contexts import lognormal, one_long
from benchmarks.gpu.decode import FULL
from benchmarks.gpu.random_model import LLAMA_8B
from benchmarks.simulator.gpu_model.hardware import Hardware
from benchmarks.simulator.gpu_model.launches import TracedModel, step_of
from benchmarks.simulator.gpu_model.times import LLAMA_8B_HEADS, AttentionTimes, step_time

# As the benchmark of kernels names them: paged_decode by contexts, paged_attention by (new tokens, context)
DECODES: dict[str, Sequence[int]] = {
    "1 × 4096 tokens": [4096],
    "1 × 32768 tokens": [32768],
    "32 × 4096 tokens": [4096] * 32,
    "64 × 8192 tokens": [8192] * 64,
    "256 × 1024 tokens": [1024] * 256,
    "64 lognormal, median 2048": lognormal(64, 2048).tolist(),
    "63 × 1024, 1 × 32768": one_long(63, 1024, 32768).tolist(),
}
PREFILLS: dict[str, Sequence[tuple[int, int]]] = {
    "1 × 4096 of 4096 tokens": [(4096, 4096)],
    "8 × 1024 of 1024 tokens": [(1024, 1024)] * 8,
    "1 × 2048 of 8192 tokens": [(2048, 8192)],
}
# Steps of more tokens are enqueued kernel by kernel.
GRAPH_TOKENS = 512


def predict(hardware: Hardware) -> dict[str, Any]:
    """Rows of kernels, decode steps and mixed steps, in milliseconds."""
    attention = AttentionTimes(LLAMA_8B_HEADS, hardware)
    return {
        "hardware": {"name": hardware.name, "origin": hardware.origin},
        "kernels": list(_kernels(attention, hardware)),
        **_steps(attention, hardware),
    }


def _kernels(attention: AttentionTimes, hardware: Hardware) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape, contexts in DECODES.items():
        seconds = attention.decode(contexts) + 2 * hardware.graph_launch_seconds
        share = attention.kv_bytes(contexts) / seconds / hardware.bytes_per_second
        rows.append({"op": "paged_decode", "shape": shape, "ms": seconds * 1e3, "of_device": share})
    for shape, lengths in PREFILLS.items():
        seconds = attention.prefill(lengths) + hardware.graph_launch_seconds
        share = attention.prefill_operations(lengths) / seconds / hardware.operations_per_second
        rows.append({"op": "paged_attention", "shape": shape, "ms": seconds * 1e3, "of_device": share})
    return rows


def _steps(attention: AttentionTimes, hardware: Hardware) -> dict[str, Any]:
    num_layers = LLAMA_8B["num_hidden_layers"]
    model = TracedModel(LLAMA_8B, hardware.target, max(FULL.batches), num_blocks=1)
    steps, mixed = [], []
    context = FULL.context + FULL.warm_up_steps + FULL.timed_steps // 2
    for num_seqs in FULL.batches:
        lengths = [(1, context)] * num_seqs
        time = step_time(model.trace(step_of(lengths)), lengths, attention, hardware, in_graphs=True)
        num_bytes = model.weight_bytes + num_layers * attention.kv_bytes([context] * num_seqs)
        floor = num_bytes / hardware.bytes_per_second
        steps.append(
            {
                "num_seqs": num_seqs,
                "context": FULL.context,
                "ms": time.seconds * 1e3,
                "floor_ms": floor * 1e3,
                "of_floor": time.seconds / floor,
                "idle_share": 1 - time.kernels / time.seconds,
                "num_launches": time.num_launches,
            }
        )
    for chunk in FULL.chunks:
        lengths = [(1, FULL.mixed_context)] * FULL.num_decodes + [(chunk, chunk)]
        num_tokens = FULL.num_decodes + chunk
        in_graphs = num_tokens <= GRAPH_TOKENS
        time = step_time(model.trace(step_of(lengths)), lengths, attention, hardware, in_graphs=in_graphs)
        mixed.append(
            {
                "num_decodes": FULL.num_decodes,
                "chunk": chunk,
                "num_tokens": num_tokens,
                "in_graphs": in_graphs,
                "host_ms": time.host * 1e3,
                "ms": time.seconds * 1e3,
                "num_launches": time.num_launches,
            }
        )
    return {"steps": steps, "mixed": mixed}
