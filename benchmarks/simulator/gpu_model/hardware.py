"""What a GPU can do, and what of it is reached: assumptions, until `make gpu-check` measures them."""

from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class Hardware:
    """Rates of a GPU, in bytes, operations and cycles per second, and times in seconds.

    `graph_launch_seconds` passes between two kernels of a CUDA graph, `host_launch_seconds` on the host for one that is
    launched alone, beside what Python takes to prepare it, and `replay_seconds` for a whole graph.
    """

    name: str
    target: str
    """In the table of compiled kernels."""
    bytes_per_second: float
    operations_per_second: float
    """Of products in bfloat16."""
    peak_operations_per_second: float
    cycles_per_second: float
    graph_launch_seconds: float
    host_launch_seconds: float
    replay_seconds: float
    origin: str
    issues_per_cycle: int = 4
    """Instructions that a multiprocessor issues, one for each of its four schedulers."""

    def with_rates(self, rates: dict[str, Any]) -> Self:
        """With measured rates of copies (GB/s) and products (TFLOP/s)."""
        return replace(
            self,
            bytes_per_second=rates["memory"] * 1e9,
            operations_per_second=rates["matrix"] * 1e12,
            origin="rates of copies and products as measured",
        )


# An H100 SXM: 3.35 TB/s and 989 TFLOP/s in its data sheet, of which copies reach 90 % and large products 75 %.
H100 = Hardware(
    name="H100 SXM",
    target="sm_90",
    bytes_per_second=0.90 * 3.35e12,
    operations_per_second=0.75 * 989e12,
    peak_operations_per_second=989e12,
    cycles_per_second=1.755e9,
    graph_launch_seconds=1.5e-6,
    host_launch_seconds=4e-6,
    replay_seconds=20e-6,
    origin="assumed: 90% of 3.35 TB/s, 75% of 989 TFLOP/s, 1.5 µs between two kernels of a graph",
)
