"""One trace per request: spans of all three processes under the client's trace id."""

import asyncio
from pathlib import Path

import httpx

from collector import Collector, collecting
from deployment import deployment
from quire_client import AsyncClient

GRPC_TRACE, HTTP_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"
PARENT = "00f067aa0ba902b7"
SERVICES = {"quire-gateway", "quire-scheduler", "quire-worker"}
EXPECTED = {("quire-scheduler", f"scheduler.{name}") for name in ("queued", "prefill", "decode")}
TIMEOUT = 100  # seconds


class Trace:
    """What a collector has of one trace so far. Each process exports its spans when they end."""

    def __init__(self, collector: Collector, trace: str) -> None:
        self.spans = [(name, span) for name, span in collector.spans if span.trace_id.hex() == trace]
        self.services = {name for name, _ in self.spans}
        self.names = {(name, span.name) for name, span in self.spans}
        self.parents = {span.parent_span_id.hex() for _, span in self.spans}
        self.without_parent = self.parents - {span.span_id.hex() for _, span in self.spans} - {PARENT}

    def is_whole(self) -> bool:
        return self.services == SERVICES and self.names >= EXPECTED and self._is_connected()

    def _is_connected(self) -> bool:
        """Whether the parent of each span is in the same trace; that of the outermost span is the client's span."""
        return PARENT in self.parents and not self.without_parent


async def test_request_leaves_one_trace_over_all_hops(tiny_model: Path) -> None:
    async with collecting() as (collector, endpoint):
        with deployment(
            model=str(tiny_model), OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_BSP_SCHEDULE_DELAY=100
        ) as running:
            async with AsyncClient(running.grpc) as client:
                await client.generate("A quire is", max_tokens=4, traceparent=f"00-{GRPC_TRACE}-{PARENT}-01")
            async with httpx.AsyncClient(base_url=running.http, timeout=60) as client:
                await client.post(
                    "/v1/completions",
                    json={"prompt": "A quire is", "max_tokens": 4},
                    headers={"traceparent": f"00-{HTTP_TRACE}-{PARENT}-01"},
                )
            for trace_id in (GRPC_TRACE, HTTP_TRACE):
                async with asyncio.timeout(TIMEOUT):
                    while not (trace := Trace(collector, trace_id)).is_whole():
                        await asyncio.sleep(0.05)
                assert len(trace.spans) <= 10
