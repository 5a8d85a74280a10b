"""The inputs of a body, each of which gets a value: texts, token ids, or a chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gateway_svc.chats import ChatPrompt
from gateway_svc.client_call import Call
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.embeddings.models import InputsBody
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai import chat_fields
from gateway_svc.http_api.openai.prompt_fields import read_prompts, read_retention
from gateway_svc.unvalidated_request import TokenPrompt
from gateway_svc.validated_request import TruncationSide
from gateway_svc.value_inputs import MAX_INPUTS, InputOptions, UnvalidatedInputs, ValueInput, input_fields

U = TypeVar("U", bound=UnvalidatedInputs)

_NAMES: Mapping[str, str] = {**chat_fields.NAMES, Field.PROMPT: "input"}


@dataclass(frozen=True, slots=True)
class InputsRequest(Generic[U]):
    """A call, whose only input may be a chat that is not tokenized yet."""

    unvalidated: U
    chat: ChatPrompt | None = None

    async def tokenized(self, calls: HttpCalls, exchange: HttpExchange, call: Call) -> U:
        """The call with the tokens of its chat, if it has one. Raises QuireError."""
        if self.chat is None:
            return self.unvalidated
        found = calls.find_model(exchange, call, self.unvalidated.model, self.unvalidated.field_path)
        return self.with_tokens(await calls.encode(call, found, self.chat, self.unvalidated.field_path))

    def with_tokens(self, token_ids: Sequence[int]) -> U:
        """The call for the tokens of its chat."""
        field_path = input_fields("messages", "messages", "messages")
        return replace(self.unvalidated, inputs=[ValueInput(TokenPrompt(token_ids), field_path)])


def read_options(body: InputsBody) -> InputOptions:
    """The inputs of a body, none if it has a chat, and its options. Raises QuireError."""
    prompts = []
    if body.messages is None:
        has_special = body.add_special_tokens is not False
        prompts = read_prompts("input", body.input, MAX_INPUTS, add_special_tokens=has_special)
    elif body.input is not None:
        raise invalid("messages", "must not be beside input")
    return {
        "inputs": [ValueInput(prompt, input_fields(name, name, name)) for prompt, name in prompts],
        "field_path": NamedFields(_NAMES),
        "model": body.model,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "truncation_side": TruncationSide(body.truncation_side or "right"),
        "priority": body.priority,
        "retention": read_retention(body.retention),
    }


def read_chat(body: InputsBody) -> ChatPrompt | None:
    """The chat of a body that has one. Raises QuireError."""
    if body.messages is None:
        return None
    return ChatPrompt(
        messages=chat_fields.read_messages(body.messages, "messages"),
        template_variables=chat_fields.template_variables(body.chat_template_kwargs),
        prompt_end=chat_fields.prompt_end(bool(body.add_generation_prompt), body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
    )
