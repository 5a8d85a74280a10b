"""One prompt of a call: read as a body of the HTTP API, then run by the engine, which appends its output."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, TypeAlias

from gateway_svc.client_call import Call
from gateway_svc.field_paths import FieldPath
from gateway_svc.http_api.openai.bodies import read_chat_completion, read_completion
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.generation_body import CompletionBody
from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.output import Chunk, merge_chunks
from gateway_svc.ranking import completed_sequences
from gateway_svc.request_manager import RequestManager
from gateway_svc.running_request import RunningRequest
from gateway_svc.tenant import DEFAULT_TENANT
from gateway_svc.tracing import Operation
from gateway_svc.unvalidated_request import MaxTokensRange, UnvalidatedRequest
from gateway_svc.validated_request import ValidatedRequest
from quire_offline.engine_request import OnStart
from quire_offline.outputs import ABORTED, CompletionOutput, RequestOutput, logprobs_at
from quire_offline.parameters import require_list
from quire_offline.sampling_params import RequestOutputKind, SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or an object with `prompt` or `prompt_token_ids`, as vLLM's TextPrompt and TokensPrompt."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A chat in OpenAI's format, oldest message first."""


@dataclass(slots=True, eq=False)
class OfflineRequest:
    """An EngineRequest, and its output so far. `prompt` is the text of the prompt; None: it was given as token ids.

    The engine appends on its own thread; any thread may make an output.
    """

    request_id: str
    operation: Operation
    unvalidated: UnvalidatedRequest
    field_path: FieldPath
    prompt: str | None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    prompt_token_ids: list[int] = field(default_factory=list)
    running: RunningRequest | None = None
    chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0
    was_aborted: bool = False
    is_done: bool = False
    _validated: ValidatedRequest | None = None

    @classmethod
    def of_prompt(
        cls,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int | None = None,
        max_tokens_range: MaxTokensRange = MaxTokensRange.UNLIMITED,
    ) -> "OfflineRequest":
        """A prompt to continue. Raises QuireError, which names a field as SamplingParams does."""
        given = given_prompt(prompt)
        values = {**params.values, "prompt": given, "priority": priority}
        (read,) = read_completion(CompletionBody.of(values), None).prompts
        text = given if isinstance(given, str) else None
        unvalidated = replace(read.unvalidated, max_tokens_range=max_tokens_range)
        return cls(request_id, Operation.TEXT_COMPLETION, unvalidated, read.field_path, text, params.kind)

    @classmethod
    def of_chat(
        cls, request_id: str, messages: Messages, params: SamplingParams, options: Mapping[str, Any]
    ) -> "OfflineRequest":
        """A chat to answer; `options` are fields of a chat's body. Raises QuireError."""
        values = {**params.values, **options, "messages": [_message(one, index) for index, one in enumerate(messages)]}
        num_top = values.pop("logprobs", None)
        if num_top is not None:  # a chat's body says in one field whether there are any, and how many in another
            values |= {"logprobs": True, "top_logprobs": num_top}
        UndefinedFields.REFUSE.check(ChatBody, values)
        (read,) = read_chat_completion(ChatBody.of(values), None).prompts
        unvalidated = replace(read.unvalidated, max_tokens_range=MaxTokensRange.UNLIMITED)
        return cls(request_id, Operation.CHAT, unvalidated, read.field_path, None, params.kind)

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def max_tokens(self) -> float:
        limits = (self.unvalidated.max_tokens, self.unvalidated.default_max_tokens, math.inf)
        return next(limit for limit in limits if limit is not None)

    @property
    def has_numbered_fields(self) -> bool:
        return False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    async def validate(self, manager: RequestManager, model: CatalogModel) -> None:
        self._validated = validated = await manager.validate(
            self._call, model, self.unvalidated, self.field_path, self.request_id
        )
        self.prompt_token_ids = validated.prompt_token_ids
        if self.operation is Operation.CHAT:
            self.prompt = model.tokenizer.vocabulary.text(validated.prompt_token_ids)

    async def compute(self, manager: RequestManager, on_start: OnStart, on_progress: Callable[[], None]) -> None:
        assert self._validated is not None, "it was validated"
        async with manager.run(self._call, [self._validated]) as group:
            on_start(group)
            (self.running,) = group.requests
            while chunks := await group.next():
                self.chunks += (chunk for _, chunk in chunks)
                self.num_tokens = group.usage.completion_tokens
                on_progress()

    @property
    def is_ranked(self) -> bool:
        """Whether its sequences are known only when all have ended."""
        return self.running is not None and self.running.rendering.is_best_of

    @property
    def _call(self) -> Call:
        return Call(DEFAULT_TENANT, self.operation)

    def output(self, *, finished: bool) -> RequestOutput:
        """The output so far, or all of it. One that was aborted has `n` sequences, also those without a token."""
        running = self.running
        if running is None:
            indices = range(self.num_sequences if finished and self.was_aborted else 0)
            logprobs: dict[str, Any] = {}
            if self.unvalidated.logprobs is not None:
                logprobs = {"cumulative_logprob": 0, "logprobs": []}
            outputs = [CompletionOutput(index, "", [], finish_reason=ABORTED, **logprobs) for index in indices]
            return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, finished)
        chunks, ends = self.chunks[:], finished and self.was_aborted
        if ends:
            empty = (Chunk(index, 0) for index in range(self.num_sequences))
            whole = merge_chunks([*empty, *chunks])[: self.num_sequences]
        else:
            whole = completed_sequences(chunks, running.rendering) if finished else merge_chunks(chunks)
        return self.with_outputs([self.completion(chunk, ends=ends) for chunk in whole], finished=finished)

    @property
    def num_sequences(self) -> int:
        return self.unvalidated.n or 1

    def completion(self, chunk: Chunk, *, ends: bool) -> CompletionOutput:
        """A sequence of a request that runs, or a part of it. With `ends` an abort ends it, if nothing else has."""
        assert self.running is not None, "it has chunks"
        rendering = self.running.rendering
        return CompletionOutput.of(
            chunk,
            self.running.vocabulary,
            has_logprobs=rendering.logprobs is not None,
            stop_token_ids=rendering.stop_token_ids,
            was_aborted=ends,
        )

    def with_outputs(
        self, outputs: list[CompletionOutput], *, finished: bool, has_prompt: bool = True
    ) -> RequestOutput:
        """The output of a request that runs, of these sequences; with `has_prompt` with log-probabilities of the
        prompt.
        """
        running = self.running
        assert running is not None, "it has outputs"
        prompt_logprobs = None
        if has_prompt and running.rendering.prompt_logprobs is not None and self.chunks and running.prompt is not None:
            prompt_logprobs = [None, *(logprobs_at(one, running.vocabulary) for one in running.prompt.logprobs)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=running.usage.cached_tokens,
            seed=running.rendering.seed,
        )


def prompts_of(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a call: a text, an object, or token ids are one. Raises TypeError."""
    if isinstance(given, str | Mapping):
        return [given]
    require_list(given, "prompts", "a text, token ids, an object, or a list of these")
    if len(given) > 0 and isinstance(given[0], Integral):
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


def chats_of(given: Messages | Sequence[Messages]) -> list[Messages]:
    """The chats of a call: a list of messages is one. Raises TypeError."""
    require_list(given, "messages", "a list of messages, or a list of such lists")
    if len(given) > 0 and isinstance(given[0], Mapping):
        return [given]  # type: ignore[list-item]
    for index, chat in enumerate(given):
        require_list(chat, f"messages[{index}]", "a message, or a list of messages")
    return list(given)  # type: ignore[arg-type]


def given_prompt(prompt: Prompt) -> str | list[int]:
    """A prompt as a body has it. Raises TypeError for an object with other keys, or anything else."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        keys = [name for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
        if not keys or not prompt.keys() <= {"prompt_token_ids", "prompt"}:
            raise TypeError(f"a prompt has the key prompt or prompt_token_ids, not {', '.join(map(str, prompt))}")
        return given_prompt(prompt[keys[0]])
    require_list(prompt, "a prompt", "a text, token ids or an object")
    return [_token_id(one) for one in prompt]


def _token_id(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"a prompt: token ids must be integers, not {type(given).__name__}")
    return int(given)


def _message(given: object, index: int) -> dict[str, Any]:
    if not isinstance(given, list | tuple):  # of pairs, which a chat can be: two keys of one message
        with suppress(TypeError, ValueError):
            return dict(given)  # type: ignore[call-overload,no-any-return]
    raise TypeError(f"messages[{index}]: must be an object with a role and a content, not {type(given).__name__}")
