"""A body of POST /v1/responses as a request to the validator, and what is stored with it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway_svc.chat_validation import TOOL_NAME, TOOL_NAME_RULE
from gateway_svc.chats import ChatMessage, ChatPrompt, ClientTool, ToolChoice, ToolMode
from gateway_svc.constraints import UnvalidatedConstraint
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.body_names import BODY_NAMES
from gateway_svc.http_api.calls import PromptRequest
from gateway_svc.http_api.json_body import invalid, json_text
from gateway_svc.http_api.openai.chat_fields import custom_input, template_variables
from gateway_svc.http_api.openai.constraint_fields import ConstraintField, only_constraint, structured_outputs
from gateway_svc.http_api.responses.conversation import chat_messages, input_items
from gateway_svc.http_api.responses.models import InputTokensBody, ResponsesBody, TextOptions
from gateway_svc.http_api.responses.namespaces import model_name
from gateway_svc.http_api.responses.output_items import Json
from gateway_svc.http_api.responses.stored_response import StoredResponse
from gateway_svc.http_api.responses.tool_models import (
    AllowedResponseTools,
    ChosenTool,
    CustomTool,
    FunctionTool,
    GrammarOfInput,
    NamespaceTool,
)
from gateway_svc.retention import NONE
from gateway_svc.sampling_fields import SAMPLING_FIELDS
from gateway_svc.unvalidated_request import EndOfText, MaxTokensRange, ResponseMode, UnvalidatedRequest
from gateway_svc.validated_request import OnDisconnect, SpecialTokens, StopText, ValidatedRequest
from svc_common.attachments import MAX_ATTACHMENT_BYTES
from svc_common.errors import QuireError, Reason

_LOGPROBS = "message.output_text.logprobs"

_NAMES: Mapping[str, str] = {
    **BODY_NAMES,
    Field.PROMPT: "input",
    Field.MESSAGES: "input",
    Field.REASONING_EFFORT: "reasoning.effort",
    Field.TEMPLATE_VARIABLES: "chat_template_kwargs",
    Field.MAX_TOKENS: "max_output_tokens",
    Field.LOGPROBS: "top_logprobs",
    Field.RETENTION: "store",
}


@dataclass(frozen=True, slots=True)
class ResponseName:
    """The id of a response. `is_repeatable`: it is made of an idempotency key, so that a repeated call has it again."""

    id: str
    is_repeatable: bool = False


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A body, its response's name, and the items of the conversation that it continues."""

    body: ResponsesBody
    name: ResponseName
    history: Sequence[Json]
    input: Sequence[Json]

    @classmethod
    def of(cls, body: ResponsesBody, name: ResponseName, history: Sequence[Json]) -> "ResponseRequest":
        """Raises QuireError."""
        if body.background and body.store is False:
            raise invalid("background", "background can only be used when `store` is true")
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options", "needs stream to be true")
        return cls(body, name, history, input_items(body.input, name.id, history))

    @classmethod
    def counted(cls, body: InputTokensBody, name: ResponseName, history: Sequence[Json]) -> "ResponseRequest":
        """A request that is not submitted: only its prompt counts. Raises QuireError."""
        return cls(body, name, history, input_items([] if body.input is None else body.input, name.id, history))

    @property
    def is_stored(self) -> bool:
        """Whether the client asks for it to be stored."""
        return self.body.store is not False

    @property
    def has_logprobs(self) -> bool:
        """Whether the text has log-probabilities."""
        return self.body.top_logprobs is not None or _LOGPROBS in (self.body.include or ())

    @property
    def messages(self) -> list[ChatMessage]:
        """The chat. Raises QuireError."""
        is_text = isinstance(self.body.input, str)
        return chat_messages(self.body.instructions, self.history, self.input, is_text=is_text)

    def prompt(self, messages: Sequence[ChatMessage]) -> PromptRequest:
        """The request with these messages for the validator. Raises QuireError."""
        body = self.body
        reasoning, stop = body.reasoning, body.stop
        constrained = only_constraint([*_text_format(body.text), *structured_outputs(body.structured_outputs)])
        given = {one.name: getattr(body, one.name, None) for one in SAMPLING_FIELDS}
        unvalidated = UnvalidatedRequest(
            prompt=ChatPrompt(
                messages=messages,
                tools=tuple(_tools(body.tools or ())),
                tool_choice=_tool_choice(body.tool_choice),
                parallel_tool_calls=body.parallel_tool_calls,
                template_variables=template_variables(body.chat_template_kwargs),
                reasoning_effort=None if reasoning is None else reasoning.effort,
            ),
            model=body.model,
            sampling={name: value for name, value in given.items() if value is not None},
            seed=body.seed,
            logit_bias=body.logit_bias or {},
            bad_words=body.bad_words or [],
            max_tokens=body.max_output_tokens,
            # Messages are left out for the sake of max_output_tokens.
            max_tokens_range=MaxTokensRange.ROOM if body.truncation == "auto" else MaxTokensRange.CONTEXT,
            min_tokens=body.min_tokens,
            stop=[stop] if isinstance(stop, str) else stop or (),
            stop_token_ids=body.stop_token_ids or [],
            end_of_text=EndOfText.IGNORED if body.ignore_eos else EndOfText.ENDS,
            stop_text=StopText.INCLUDED if body.include_stop_str_in_output else StopText.EXCLUDED,
            constraint=None if constrained is None else constrained.constraint,
            logprobs=(body.top_logprobs or 0) if self.has_logprobs else None,
            # The scheduler keeps a named request while its client is away, and cancels another one.
            request_id=self.name.id if self.is_stored else None,
            priority=body.priority,
            retention=None if self.is_stored else NONE,
            cache_salt=body.cache_salt,
            special_tokens=SpecialTokens.of(
                is_kept=body.skip_special_tokens is False, has_spaces=body.spaces_between_special_tokens is not False
            ),
            response_mode=ResponseMode.STREAMED if body.stream else ResponseMode.WHOLE,
        )
        lone = frozenset[str]({Field.STOP}) if isinstance(stop, str) else frozenset[str]()
        names = _NAMES if constrained is None else {**_NAMES, **constrained.names}
        return PromptRequest(unvalidated, NamedFields(names, lone))

    def stored(self, valid: ValidatedRequest, created_at: int) -> StoredResponse:
        """What is stored with the request; `created_at` is in seconds since 1970."""
        body = self.body
        text_format = None if body.text is None or body.text.format is None else body.text.format
        reasoning = body.reasoning
        head: Json = {
            "id": self.name.id,
            "object": "response",
            "created_at": created_at,
            "background": bool(body.background),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": valid.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": _is_recorded(valid),
            "temperature": valid.sampling.params["temperature"],
            "text": {"format": {"type": "text"} if text_format is None else _dumped(text_format)},
            "tool_choice": _choice_json(body.tool_choice),
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": valid.sampling.params["top_p"],
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }
        return StoredResponse(
            head, list(self.history), list(self.input), self.has_logprobs, body.include_reasoning is False
        )

    def attached(self, valid: ValidatedRequest, stored: StoredResponse) -> ValidatedRequest:
        """The request with what is stored. Raises QuireError."""
        if not _is_recorded(valid):
            if self.body.background:
                raise invalid("background", "needs a record of the response, and the API key allows none")
            stored.to_bytes()  # it is sent, too
            return valid
        data = stored.to_bytes()
        if len(data) > MAX_ATTACHMENT_BYTES:
            message = f"the items of the conversation have more than {MAX_ATTACHMENT_BYTES} bytes"
            raise QuireError(Reason.MESSAGE_TOO_LARGE, message, field="input")
        # The client knows the id from the beginning of a stream, and otherwise if the response is complete.
        has_id = self.name.is_repeatable or self.body.stream or self.body.background
        on_disconnect = OnDisconnect.DETACH if has_id else OnDisconnect.CANCEL
        background = bool(self.body.background)
        return replace(valid, attachment=data, is_background=background, on_disconnect=on_disconnect)


def _optional_json(where: str, value: Json | None) -> str | None:
    return None if value is None else json_text(where, value)


def _is_recorded(valid: ValidatedRequest) -> bool:
    return valid.retention is None or valid.retention.is_recorded


def _text_format(options: TextOptions | None) -> Iterator[ConstraintField]:
    form = None if options is None else options.format
    if form is None or form.type == "text":
        return
    path = "text.format.type" if form.type == "json_object" else "text.format.schema"
    if form.type == "json_object":
        constraint = UnvalidatedConstraint(Field.JSON_OBJECT)
    elif form.schema_ is None:
        raise invalid(path, "must be given")
    else:
        text = json_text(path, form.schema_)
        constraint = UnvalidatedConstraint(Field.JSON_SCHEMA, text, closes_objects=bool(form.strict))
    yield ConstraintField(constraint, path, {constraint.field: path})


def _tools(tools: Sequence[FunctionTool | CustomTool | NamespaceTool]) -> Iterator[ClientTool]:
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if isinstance(tool, FunctionTool):
            yield _tool(tool, path)
            continue
        if isinstance(tool, CustomTool):
            grammar = tool.format if isinstance(tool.format, GrammarOfInput) else None
            yield ClientTool(tool.name, tool.description, custom=custom_input(grammar, f"{path}.format"), path=path)
            continue
        if not TOOL_NAME.fullmatch(tool.name):
            raise invalid(f"{path}.name", TOOL_NAME_RULE)
        for place, function in enumerate(tool.tools):
            yield _tool_of(tool, function, f"{path}.tools[{place}]")


def _tool_of(namespace: NamespaceTool, function: FunctionTool, path: str) -> ClientTool:
    """A function of a namespace."""
    if not TOOL_NAME.fullmatch(function.name):
        raise invalid(f"{path}.name", TOOL_NAME_RULE)
    name = model_name(namespace.name, function.name)
    if not TOOL_NAME.fullmatch(name):
        raise invalid(f"{path}.name", f"is too long with its namespace: {name}")
    descriptions = [one for one in (namespace.description, function.description) if one is not None]
    return replace(_tool(function, path), name=name, description="\n".join(descriptions) if descriptions else None)


def _tool(tool: FunctionTool, path: str) -> ClientTool:
    return ClientTool(
        name=tool.name,
        description=tool.description,
        parameters=_optional_json(f"{path}.parameters", tool.parameters),
        is_strict=bool(tool.strict),
        path=path,
    )


def _tool_choice(choice: str | ChosenTool | AllowedResponseTools | None) -> ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, AllowedResponseTools):
        names = (model_name(tool.namespace, tool.name) for tool in choice.tools)
        return ToolChoice.among(ToolMode(choice.mode), names, "tool_choice.tools")
    if isinstance(choice, ChosenTool):
        return ToolChoice(ToolMode.NAMED, model_name(choice.namespace, choice.name))
    return ToolChoice(ToolMode(choice))


def _choice_json(choice: str | ChosenTool | AllowedResponseTools | None) -> Any:
    if isinstance(choice, ChosenTool | AllowedResponseTools):
        return choice.model_dump(exclude_none=True)
    return choice or "auto"


def _dumped(model: Any) -> Json:
    dumped: Json = model.model_dump(by_alias=True)
    return dumped
