"""An engine under the load of `quire bench`."""

import itertools
from time import perf_counter

from gateway_svc.unvalidated_request import MaxTokensRange
from quire_client.bench.latency import RequestTimings, TokenArrival
from quire_client.bench.mix import MixRequest
from quire_client.bench.targets import OnTokens, TargetModel, timeline
from quire_offline.engine import OfflineEngine
from quire_offline.errors import client_errors
from quire_offline.offline_request import OfflineRequest
from quire_offline.sampling_params import SamplingParams


class EngineTarget:
    """A BenchTarget, on the engine's loop. Tokens arrive where a program would get them."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self._ids = map(str, itertools.count())

    async def model(self) -> TargetModel:
        description = self._engine.description
        return TargetModel(description.model, description.limits.vocab_size)

    async def run(self, request: MixRequest, on_tokens: OnTokens) -> RequestTimings:
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0, ignore_eos=True)
        arrivals: list[TokenArrival] = []
        num_tokens = 0

        def on_progress(running: OfflineRequest) -> None:
            nonlocal num_tokens
            if count := running.num_tokens - num_tokens:
                num_tokens = running.num_tokens
                arrivals.append(TokenArrival(perf_counter(), count))
                on_tokens(count)

        sent = perf_counter()
        with client_errors():
            offline = OfflineRequest.of_prompt(
                next(self._ids), request.prompt_token_ids, params, max_tokens_range=MaxTokensRange.ROOM
            )
            await self._engine.run(offline, on_progress)
        return timeline(sent, tuple(arrivals))
