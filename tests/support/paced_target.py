"""A target of the load generator that sends tokens without a server."""

import asyncio
from time import perf_counter

from quire_client.bench.latency import RequestTimings, TokenArrival
from quire_client.bench.mix import MixRequest
from quire_client.bench.targets import OnTokens, TargetModel


class Paced:
    """Sends a token for each request in each iteration of the event loop, up to `output_tokens`."""

    def __init__(self) -> None:
        self.open: list[MixRequest] = []
        self.beside: list[int] = []  # number of open streams when a prompt arrived
        self.prompts: list[tuple[int, ...]] = []

    async def model(self) -> TargetModel:
        return TargetModel("paced", None)

    async def run(self, request: MixRequest, on_tokens: OnTokens) -> RequestTimings:
        self.prompts.append(request.prompt_token_ids)
        if request.output_tokens == 1:
            self.beside.append(len(self.open))
        self.open.append(request)
        sent, arrivals = perf_counter(), []
        try:
            for _ in range(request.output_tokens):
                await asyncio.sleep(0)
                arrivals.append(TokenArrival(perf_counter(), 1))
                on_tokens(1)
            return RequestTimings(sent, tuple(arrivals))
        finally:
            self.open.remove(request)
