"""Bodies of Ollama's API as unvalidated requests."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gateway_svc.chats import ChatMessage, ChatPrompt, ToolCall
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.embeddings import Normalization, UnvalidatedEmbeddings
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.body_names import BODY_NAMES
from gateway_svc.http_api.calls import PromptRequest
from gateway_svc.http_api.json_body import invalid, json_text
from gateway_svc.http_api.ollama.models import (
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBase,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from gateway_svc.http_api.openai.chat_fields import FUNCTION_NAMES, client_tool
from gateway_svc.http_api.openai.prompt_fields import read_prompts
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from gateway_svc.unvalidated_request import InfillPrompt, Prompt, ResponseMode, TextPrompt, UnvalidatedRequest
from gateway_svc.value_inputs import MAX_INPUTS, ValueInput, input_fields

_OPTION_NAMES = {"repetition_penalty": "repeat_penalty"}
"""Sampling parameters that options spell in another way."""

_NAMES: Mapping[str, str] = {
    **BODY_NAMES,
    Field.PROMPT: "messages",
    Field.TOOL_CHOICE: "tools",
    Field.REASONING_EFFORT: "think",
    Field.JSON_OBJECT: "format",
    Field.JSON_SCHEMA: "format",
    **{one.path: f"options.{_OPTION_NAMES.get(one.name, one.name)}" for one in SAMPLING_FIELDS},
    Field.SEED: "options.seed",
    Field.MAX_TOKENS: "options.num_predict",
    Field.STOP: "options.stop",
    Field.LOGPROBS: "top_logprobs",
}
_UNLIMITED = (-1, -2)
_TRUNCATION: Mapping[str, str] = {Field.TRUNCATE_PROMPT_TOKENS: "truncate"}


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A body's prompt, and whether its answer is streamed. A body without a prompt loads the model."""

    prompt: PromptRequest
    is_streamed: bool

    @property
    def loads(self) -> bool:
        """Whether nothing is to be generated."""
        return self.prompt.unvalidated.prompt is None


def read_chat(body: OllamaChatBody, request_id: str | None) -> OllamaRequest:
    """The request of a body of /api/chat. Raises QuireError."""
    prompt = None
    if body.messages:
        prompt = ChatPrompt(
            messages=_messages(body.messages),
            tools=tuple(
                client_tool(tool.function, f"tools[{index}].function") for index, tool in enumerate(body.tools or ())
            ),
            reasoning_effort=_effort(body),
        )
    return _request(body, prompt, request_id, _NAMES)


def read_generate(body: OllamaGenerateBody, request_id: str | None) -> OllamaRequest:
    """The request of a body of /api/generate. Raises QuireError."""
    names = {**_NAMES, Field.MESSAGES: "prompt", Field.PROMPT: "prompt", Field.TEXT: "prompt"}
    prompt: Prompt | None = None
    for name, given in {"raw": body.raw, "suffix": body.suffix}.items():
        if given and body.system:
            raise invalid("system", f"must not be beside {name}")
    if body.raw and body.suffix:
        raise invalid("suffix", "must not be beside raw")
    if body.suffix:
        prompt = InfillPrompt(body.prompt or "", body.suffix)
    elif body.prompt and body.raw:
        prompt = TextPrompt(body.prompt)
    elif body.prompt:
        system = [ChatMessage("system", body.system, path="system", names=_WHOLE)] if body.system else []
        messages = [*system, ChatMessage("user", body.prompt, path="prompt", names=_WHOLE)]
        prompt = ChatPrompt(messages, reasoning_effort=_effort(body))
    return _request(body, prompt, request_id, names)


def read_embed(body: OllamaEmbedBody, _: str | None = None) -> UnvalidatedEmbeddings:
    """The request of a body of /api/embed; without inputs it loads the model. Raises QuireError."""
    embeddings = _embeddings(body, "input", body.input, Normalization.L2)
    return replace(embeddings, dimensions=body.dimensions)


def read_embeddings_prompt(body: OllamaEmbeddingsBody, _: str | None = None) -> UnvalidatedEmbeddings:
    """The request of a body of /api/embeddings; without inputs it loads the model. Raises QuireError."""
    return _embeddings(body, "prompt", body.prompt, Normalization.NONE)


def _embeddings(
    body: OllamaEmbeddingsBase, field: str, texts: str | list[str] | None, normalization: Normalization
) -> UnvalidatedEmbeddings:
    prompts = read_prompts(field, texts, MAX_INPUTS, add_special_tokens=True) if texts else []
    return UnvalidatedEmbeddings(
        inputs=[ValueInput(prompt, input_fields(name, name, name, _TRUNCATION)) for prompt, name in prompts],
        field_path=NamedFields({Field.PROMPT: field, **_TRUNCATION}),
        model=body.model,
        normalization=normalization,
        truncate_prompt_tokens=None if body.truncate is False else -1,
    )


def _request(
    body: OllamaBody, prompt: Prompt | None, request_id: str | None, names: Mapping[str, str]
) -> OllamaRequest:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    options = body.options or OllamaOptions()
    stop = options.stop
    sampling = {one.name: getattr(options, _OPTION_NAMES.get(one.name, one.name)) for one in SAMPLING_FIELDS}
    is_streamed = body.stream is not False
    unvalidated = UnvalidatedRequest(
        prompt=prompt,
        model=body.model,
        sampling={name: value for name, value in sampling.items() if value is not None},
        seed=options.seed,
        max_tokens=None if options.num_predict in _UNLIMITED else options.num_predict,
        stop=[stop] if isinstance(stop, str) else stop or [],
        constraint=_constraint(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        request_id=request_id,
        response_mode=ResponseMode.STREAMED if is_streamed else ResponseMode.WHOLE,
    )
    lone = frozenset[str]({Field.STOP}) if isinstance(stop, str) else frozenset[str]()
    return OllamaRequest(PromptRequest(unvalidated, NamedFields(names, lone)), is_streamed)


# Fields of chats, by their names in the contract.
_WHOLE = {"content": ""}
_MESSAGE_NAMES = {"reasoning": "thinking", "name": "tool_name"}


class _PendingCalls:
    """Calls without a result, in their order. The time to find one does not depend on how many there are."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, ToolCall] = OrderedDict()  # by number
        self._numbers: defaultdict[str, deque[int]] = defaultdict(deque)  # by tool
        self._num_added = 0

    def add(self, calls: Sequence[ToolCall]) -> None:
        for number, call in enumerate(calls, self._num_added):
            self._calls[number] = call
            self._numbers[call.name].append(number)
        self._num_added += len(calls)

    def pop_id(self, name: str | None) -> str | None:
        """Removes the first call of a tool, or with None of any tool. Returns its id; None: there is no such call."""
        if name is None:
            first = next(iter(self._calls.values()), None)
            if first is None:
                return None
            name = first.name
        numbers = self._numbers.get(name)
        return self._calls.pop(numbers.popleft()).id if numbers else None


def _messages(messages: list[OllamaMessage]) -> list[ChatMessage]:
    """The messages. A result without the id of its call is for the next call of its tool."""
    read: list[ChatMessage] = []
    pending = _PendingCalls()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        calls = tuple(
            ToolCall(
                name=call.function.name,
                arguments=json_text(f"{path}.tool_calls[{place}].function.arguments", call.function.arguments or {}),
                id=call.id or f"call_{index}_{place}",
                path=f"{path}.tool_calls[{place}]",
                names=FUNCTION_NAMES,
            )
            for place, call in enumerate(message.tool_calls or ())
        )
        pending.add(calls)
        call_id = message.tool_call_id
        if message.role == "tool" and call_id is None:
            call_id = pending.pop_id(message.tool_name)
        read.append(
            ChatMessage(
                role=message.role,
                content=message.content or (None if calls or message.thinking else ""),
                tool_calls=calls,
                tool_call_id=call_id,
                name=message.tool_name,
                reasoning=message.thinking,
                path=path,
                names=_MESSAGE_NAMES,
            )
        )
    return read


def _effort(body: OllamaBody) -> str | None:
    match body.think:
        case None | str():
            return body.think
        case False:
            return "none"
    return "medium"


def _constraint(body: OllamaBody) -> UnvalidatedConstraint | None:
    match body.format:
        case None | "":
            return None
        case "json":
            return UnvalidatedConstraint(Field.JSON_OBJECT)
    return UnvalidatedConstraint(Field.JSON_SCHEMA, json_text("format", body.format))
