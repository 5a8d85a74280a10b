"""A worker without a model: the real step stream, with a checksum instead of a model."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import grpc

from memory_worker import next_token, prompt_logprob, prompt_value
from quire.worker.v1 import worker_pb2 as worker_v1
from quire.worker.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from svc_common.protocols import STEP_PROTOCOLS

VOCAB = 1000


class ChecksumService(WorkerServiceServicer):
    """Samples `next_token` of all tokens and confirms every swap. Keeps block hashes and the requests that it received.

    If `max_sampled_tokens` is above 1, its steps return 0 to `max_sampled_tokens` tokens for a sequence, in turn.
    `results` maps each kind of result, other than tokens, to the way in which its prompts are computed.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        fingerprint: bytes = b"checksum",
        epoch: int = 0,
        num_host_blocks: int = 0,
        max_sampled_tokens: int = 1,
        model: str = "checksum",
        results: Mapping[str, worker_v1.PromptComputation] | None = None,
    ) -> None:
        self.about = worker_v1.DescribeResponse(
            model=model,
            fingerprint=fingerprint,
            tokenizer_fingerprint=b"tokens",
            context_length=256,
            vocab_size=VOCAB,
            block_size=4,
            block_bytes=64,
            num_blocks=num_blocks,
            max_step_tokens=64,
            max_sequences=16,
            epoch=epoch,
            num_host_blocks=num_host_blocks,
            swap_bytes_per_second=1e9 if num_host_blocks else 0.0,
            prefill_tokens_per_second=1e4,
            max_sampled_tokens=max_sampled_tokens,
            oldest_protocol=STEP_PROTOCOLS.oldest,
            newest_protocol=STEP_PROTOCOLS.newest,
        )
        self._results = {"tokens": worker_v1.PROMPT_COMPUTATION_CHUNKED} | dict(results or {})
        if results is not None:
            for name, computation in self._results.items():
                computed = self.about.computed_results.add(computation=computation)
                getattr(computed.result, name).SetInParent()
        self._new: dict[int, worker_v1.NewSequence] = {}  # the sequences of the stream, in order of arrival
        self.num_returned: Counter[int] = Counter()  # number of results by their number of tokens
        self.openings: list[worker_v1.StepRequest] = []
        self.steps: list[worker_v1.StepRequest] = []
        self.gate = asyncio.Event()  # steps wait while it is not set
        self.gate.set()
        self.seconds = 0.0  # seconds per step
        self.spoil: dict[str, list[int]] = {}  # values that replace fields of the next result
        self.failing_token: int | None = None  # sequences that start with this token fail
        self.block_hashes: dict[int, bytes] = {}  # of the device
        self.host_block_hashes: dict[int, bytes] = {}
        self.restarts: list[worker_v1.RestartRequest] | None = None  # orders that it accepts; it does not know the call
        self.trace = ""  # path of its profiles; it refuses them without one

    async def Describe(self, request: worker_v1.DescribeRequest, context: Any) -> worker_v1.DescribeResponse:
        return self.about

    async def ReportBlockHashes(
        self, request: worker_v1.ReportBlockHashesRequest, context: Any
    ) -> worker_v1.ReportBlockHashesResponse:
        device, host = (
            worker_v1.BlockHashes(block_ids=block_hashes.keys(), hashes=block_hashes.values())
            for block_hashes in (self.block_hashes, self.host_block_hashes)
        )
        return worker_v1.ReportBlockHashesResponse(device=device, host=host)

    async def Restart(self, request: worker_v1.RestartRequest, context: Any) -> worker_v1.RestartResponse:
        if self.restarts is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        else:
            self.restarts.append(request)
        return worker_v1.RestartResponse()

    async def StartProfile(
        self, request: worker_v1.StartProfileRequest, context: Any
    ) -> worker_v1.StartProfileResponse:
        await self._check_profiles(context)
        return worker_v1.StartProfileResponse()

    async def StopProfile(self, request: worker_v1.StopProfileRequest, context: Any) -> worker_v1.StopProfileResponse:
        await self._check_profiles(context)
        return worker_v1.StopProfileResponse(path=self.trace)

    async def _check_profiles(self, context: Any) -> None:
        if not self.trace:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "QUIRE_PROFILE_DIR is not set")

    async def Step(
        self, requests: AsyncIterator[worker_v1.StepRequest], context: Any
    ) -> AsyncIterator[worker_v1.StepResponse]:
        known: dict[int, list[int]] = {}
        async for request in requests:
            response = worker_v1.StepResponse(
                epoch=request.epoch, generation=request.generation, step_id=request.step_id
            )
            if request.step_id == 0:
                if request.epoch < self.about.epoch:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"after epoch {self.about.epoch}")
                self.openings.append(request)
                self._new.clear()
                response.ready.SetInParent()
            else:
                self.steps.append(request)
                await self.gate.wait()
                await asyncio.sleep(self.seconds)
                response.result.CopyFrom(self._run(request, known))
            yield response

    def _label(self, request: worker_v1.StepRequest) -> None:
        for block_hashes, given in (
            (self.block_hashes, request.block_hashes),
            (self.host_block_hashes, request.host_block_hashes),
        ):
            block_hashes.update(zip(given.block_ids, given.hashes, strict=True))
        # All blocks that a step adds count as written, including those of a cached prefix.
        for block in (*request.scheduled.new_block_ids, *request.swap_in.destinations, *request.copies.destinations):
            self.block_hashes.pop(block, None)
        for block in request.swap_out.destinations:
            self.host_block_hashes.pop(block, None)

    def _run(self, request: worker_v1.StepRequest, known: dict[int, list[int]]) -> worker_v1.StepResult:
        self._label(request)
        for sequence_id in request.finished_ids:
            known.pop(sequence_id, None)
        for new in request.new_sequences:
            known[new.sequence_id] = list(new.token_ids)
            self._new[new.sequence_id] = new
        schedule = request.scheduled
        result = worker_v1.StepResult(sequence_ids=schedule.sequence_ids)
        for moved, direction in (
            (request.swap_out, worker_v1.DIRECTION_OUT),
            (request.swap_in, worker_v1.DIRECTION_IN),
        ):
            if moved.sources:
                result.swaps.add(step_id=request.step_id, direction=direction, duration_us=1)
        for schedule_index, sequence_id in enumerate(schedule.sequence_ids):
            tokens, num_tokens = known[sequence_id], schedule.num_tokens[schedule_index]
            kind = self._new[sequence_id].result.WhichOneof("kind") or "tokens"
            if kind == "prompt_logprobs":
                self._add_prompt_logprobs(result, self._new[sequence_id], schedule, schedule_index)
            elif kind != "tokens":
                result.num_tokens.append(0)
                self._add_value(result, kind, known, schedule, schedule_index)
                continue
            if self.about.max_sampled_tokens > 1 and num_tokens == 1:
                most = 1 + (schedule.max_extra_tokens[schedule_index] if schedule.max_extra_tokens else 0)
                count = sum(self.num_returned.values()) % (most + 1)
                self.num_returned[count] += 1
                result.num_tokens.append(count)
                for _ in range(count):
                    tokens.append(next_token(tokens, VOCAB))
                    result.token_ids.append(tokens[-1])
                continue
            samples = schedule.starts[schedule_index] + num_tokens == len(tokens)
            if tokens[0] == self.failing_token:
                result.failures.add(schedule_index=schedule_index, message="scripted failure")
                samples = False
            result.num_tokens.append(int(samples))
            if samples:
                tokens.append(next_token(tokens, VOCAB))
                result.token_ids.append(tokens[-1])
        for name, values in self.spoil.items():
            result.ClearField(name)
            getattr(result, name).extend(values)
        self.spoil = {}
        return result

    def _add_value(
        self,
        result: worker_v1.StepResult,
        kind: str,
        known: dict[int, list[int]],
        schedule: worker_v1.Schedule,
        schedule_index: int,
    ) -> None:
        tokens, num_tokens = known[schedule.sequence_ids[schedule_index]], schedule.num_tokens[schedule_index]
        if self._results[kind] != worker_v1.PROMPT_COMPUTATION_CHUNKED:
            assert num_tokens == len(tokens), "an indivisible prompt is divided"
        if self._results[kind] == worker_v1.PROMPT_COMPUTATION_INDIVISIBLE_WITHOUT_KV:
            assert schedule.num_new_blocks[schedule_index] == 0, "blocks for what takes none"
        if schedule.starts[schedule_index] + num_tokens == len(tokens):
            result.values.add(schedule_index=schedule_index).value.numbers.extend(prompt_value(tokens, kind))
            del known[schedule.sequence_ids[schedule_index]]

    def _add_prompt_logprobs(
        self,
        result: worker_v1.StepResult,
        new: worker_v1.NewSequence,
        schedule: worker_v1.Schedule,
        schedule_index: int,
    ) -> None:
        prompt, start = list(new.token_ids[: new.prompt_length]), schedule.starts[schedule_index]
        end = min(start + schedule.num_tokens[schedule_index] + 1, len(prompt))
        if end > start + 1:
            tokens = map(partial(logprobs_at, prompt), range(start + 1, end))
            result.prompt_logprobs.add(schedule_index=schedule_index, tokens=tokens)


def logprobs_at(prompt: list[int], position: int) -> worker_v1.TokenLogprobs:
    """Log-probabilities for a prompt token; the top token is another one."""
    logprob = prompt_logprob(prompt, position)
    top = [worker_v1.Logprob(token_id=(prompt[position] + 1) % VOCAB, logprob=logprob + 1)]
    return worker_v1.TokenLogprobs(logprob=logprob, top=top)


async def serve(service: ChecksumService, port: int = 0) -> tuple[grpc.aio.Server, int]:
    """Start the service; returns its server and port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_WorkerServiceServicer_to_server(service, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port
