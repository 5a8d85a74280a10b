"""Answers in the formats of the OpenAI API: whole, and as events of a stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from gateway_svc.http_api.events import PLACEHOLDER, TextEventTemplate, sse_event
from gateway_svc.http_api.openai.answer_options import NO_OPTIONS, AnswerOptions, running_usage
from gateway_svc.http_api.openai.choice_formats import Format, Json
from gateway_svc.http_api.openai.cursor import Cursor
from gateway_svc.output import Chunk, Usage
from gateway_svc.prompt_output import PromptOutput
from gateway_svc.ranking import completed_sequences
from gateway_svc.rendering import Rendering
from gateway_svc.vocabulary import Vocabulary

_DONE = b"data: [DONE]\n\n"


class ResponseBuilder:
    """The answer to one call, of one prompt or several: choices are numbered prompt by prompt."""

    def __init__(
        self,
        form: Format,
        renderings: Sequence[Rendering],
        vocabulary: Vocabulary,
        created: int,
        cursor: Cursor | None = None,
        prompt_of: Callable[[int], PromptOutput | None] = lambda prompt_index: None,
        options: AnswerOptions = NO_OPTIONS,
        prompts: Sequence[Sequence[int]] = (),
        fingerprint: str = "",
    ) -> None:
        """`created` is in seconds since 1970. With a `cursor` events have ids, and continue from its position.
        `prompt_of` returns prompts that are returned, by index; it is called once there is a chunk. `prompts` are token
        ids, for an answer that has them. `fingerprint` names what serves the model.
        """
        self._form = form
        self._hides_reasoning = options.hides_reasoning and any(one.has_reasoning for one in renderings)
        # Log-probabilities and ids of the output's tokens would show the reasoning.
        self._renderings = [replace(one, logprobs=None) for one in renderings] if self._hides_reasoning else renderings
        self._has_output_ids = options.has_token_ids and not self._hides_reasoning
        self._texts = options.token_texts(vocabulary)
        self._options = options
        self._prompts = prompts
        self._is_one_chat = form.opening is not None and len(renderings) == 1
        self._cursor = cursor
        self._prompt_of = cache(prompt_of)
        self._text_events: dict[int, TextEventTemplate] = {}  # of each choice that has begun
        self._head: Json = {
            "id": form.id_prefix + renderings[0].request_id,
            "object": form.object_name,
            "created": created,
            "model": renderings[0].model,
            "system_fingerprint": fingerprint,
        }
        if options.service_tier is not None:
            self._head["service_tier"] = options.service_tier
        self._chunk_head = self._head | {"object": form.chunk_object_name}

    def whole(self, chunks: Sequence[tuple[int, Chunk]], usage: Usage) -> Json:
        """The whole answer, from all chunks with their prompt indices."""
        of_prompts: list[list[Chunk]] = [[] for _ in self._renderings]
        for prompt_index, chunk in chunks:
            of_prompts[prompt_index].append(chunk)
        choices = []
        for prompt_index, rendering in enumerate(self._renderings):
            for chunk in completed_sequences(of_prompts[prompt_index], rendering):
                prompt = self._prompt_of(prompt_index)
                particular = self._form.whole(self._shown(chunk), rendering, self._texts, prompt)
                choice: Json = {"token_ids": None, **self._choice(prompt_index, chunk, particular)}
                if not self._is_one_chat:
                    choice["prompt_token_ids"] = self._prompt_ids(prompt_index)
                choices.append(choice)
        whole = self._head | {"choices": choices, "usage": usage_json(usage)}
        if self._is_one_chat:
            whole["prompt_token_ids"] = self._prompt_ids(0)
        return whole | self._form.answer(self._renderings[0], self._texts, self._prompt_of(0))

    def event(self, prompt_index: int, chunk: Chunk) -> bytes:
        """The events of a chunk; empty where there is nothing to send yet."""
        chunk = self._shown(chunk)
        if not chunk.has_output and not (self._has_output_ids and chunk.token_ids):
            return b""
        index = self._index(prompt_index, chunk)
        text_event = self._text_events.get(index)
        opening = b""
        if text_event is None:
            has_begun = self._cursor is not None and self._cursor.has_begun(index)
            opening = b"" if has_begun else self._opening(prompt_index, chunk)
            self._text_events[index] = TextEventTemplate(
                self._piece(prompt_index, Chunk(chunk.index, 0, PLACEHOLDER), is_first=False)
            )
            event = sse_event(self._piece(prompt_index, chunk, is_first=not has_begun))
        elif (
            chunk.logprobs
            or chunk.finish
            or chunk.reasoning
            or chunk.tool_calls
            or self._has_output_ids
            or self._options.has_running_usage
        ):
            event = sse_event(self._piece(prompt_index, chunk, is_first=False))
        else:
            event = text_event.with_text(chunk.text)
        return opening + (event if self._cursor is None else self._cursor.advance(index, chunk) + event)

    def last_events(self, usage: Usage | None) -> bytes:
        """The last events of a stream: its usage if requested, and [DONE]."""
        cursor = self._cursor
        events = b""
        if usage is not None and not (cursor and cursor.is_past_usage):
            events += cursor.advance_past_usage() if cursor else b""
            events += sse_event(self._chunk_head | {"choices": [], "usage": usage_json(usage)})
        if not (cursor and cursor.is_done):
            events += cursor.advance_to_end() if cursor else b""
            events += _DONE
        return events

    def _shown(self, chunk: Chunk) -> Chunk:
        """What is sent of a chunk: without reasoning, with `include_reasoning: false`."""
        return replace(chunk, reasoning="", logprobs=[]) if self._hides_reasoning else chunk

    def _opening(self, prompt_index: int, chunk: Chunk) -> bytes:
        """The first event of a choice, where the format has one."""
        if self._form.opening is None:
            return b""
        choice = self._choice(prompt_index, Chunk(chunk.index, 0), self._form.opening, has_token_ids=False)
        event = self._chunk_head | {"choices": [choice]}
        if self._options.has_token_ids:
            event["prompt_token_ids"] = self._prompts[prompt_index]
        if self._options.has_running_usage:
            event["usage"] = running_usage(self._renderings[prompt_index], 0)
        line = b"" if self._cursor is None else self._cursor.open(self._index(prompt_index, chunk))
        return line + sse_event(event)

    def _piece(self, prompt_index: int, chunk: Chunk, *, is_first: bool) -> Json:
        rendering, prompt = self._renderings[prompt_index], self._prompt_of(prompt_index)
        choice = self._choice(prompt_index, chunk, self._form.piece(chunk, rendering, self._texts, is_first, prompt))
        if is_first and self._options.has_token_ids and self._form.opening is None:
            choice["prompt_token_ids"] = self._prompts[prompt_index]
        piece = self._chunk_head | {"choices": [choice]}
        if self._options.has_running_usage:
            piece["usage"] = running_usage(rendering, chunk.offset + len(chunk.token_ids))
        return piece

    def _choice(
        self, prompt_index: int, chunk: Chunk, particular: Mapping[str, Any], *, has_token_ids: bool = True
    ) -> Json:
        choice: Json = {"index": self._index(prompt_index, chunk), **particular, "finish_reason": None}
        if has_token_ids and self._has_output_ids:
            choice["token_ids"] = chunk.token_ids
        if chunk.finish is not None:
            rendering = self._renderings[prompt_index]
            choice["finish_reason"] = self._form.finish_reason(chunk.finish.reason)
            # Beyond the OpenAI API: the stop match, as in vLLM, and the seed that repeats the samples.
            choice["stop_reason"] = chunk.finish.stop_reason(rendering.stop_token_ids)
            choice["seed"] = rendering.seed
        return choice

    def _prompt_ids(self, prompt_index: int) -> Sequence[int] | None:
        """The prompt's tokens in a whole answer, which as in vLLM has the field also where they are not requested."""
        return self._prompts[prompt_index] if self._options.has_token_ids else None

    def _index(self, prompt_index: int, chunk: Chunk) -> int:
        return prompt_index * self._renderings[0].n + chunk.index


def usage_json(usage: Usage) -> Json:
    """Usage in the OpenAI API's format."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
