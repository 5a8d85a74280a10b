"""One trace per request: spans of all three processes under the client's trace id."""

import asyncio
import time
from pathlib import Path

import httpx

from collector import collecting
from deployment import deployment
from quire_client import AsyncClient

GRPC_TRACE, HTTP_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"
PARENT = "00f067aa0ba902b7"


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
            for trace in (GRPC_TRACE, HTTP_TRACE):
                expected = {
                    ("quire-scheduler", "scheduler.queued"),
                    ("quire-scheduler", "scheduler.prefill"),
                    ("quire-scheduler", "scheduler.decode"),
                }
                spans = []
                end = time.monotonic() + 100
                while time.monotonic() < end:
                    spans = [(name, span) for name, span in collector.spans if span.trace_id.hex() == trace]
                    services = {name for name, _ in spans}
                    if len(services) == 3 and expected <= {(name, span.name) for name, span in spans}:
                        break
                    await asyncio.sleep(0.05)
                assert {name for name, _ in spans} == {"quire-gateway", "quire-scheduler", "quire-worker"}
                assert expected <= {(name, span.name) for name, span in spans}
                assert len(spans) <= 10
                # The parent of each span is in the same trace; that of the outermost span is the client's span.
                known = {span.span_id.hex() for _, span in spans} | {PARENT}
                assert all(span.parent_span_id.hex() in known for _, span in spans)
                assert PARENT in {span.parent_span_id.hex() for _, span in spans}
