"""How a chat template takes tools and calls of tools, found by rendering it once with each way that templates have."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from typing import Any

from gateway_svc.chat_template import REASONING_FIELDS, ChatTemplate, ChatTemplateError, TemplateChat
from gateway_svc.chats import PromptEnd

_ID = "call_0123456789abcdef01234567"
_NAME = "probed_tool"
_ARGUMENT = "probed_argument"
_USER = {"role": "user", "content": "a"}
_SHORT_ID_LENGTH = 9

Call = tuple[str, str, Mapping[str, Any]]
"""Id, name and arguments of a call."""


class IdForm(Enum):
    """How a template takes the ids of calls."""

    GIVEN = "given"
    SHORT = "short"
    """9 letters and digits: Mistral's templates reject others."""
    NAMED = "named"
    """`functions.` with the name and a number of its own: Kimi K2's templates write no name but this one."""


class CallIds:
    """The ids of a chat's calls as its template takes them. Messages are read in their order."""

    def __init__(self, form: IdForm) -> None:
        self._form = form
        self._names: dict[str, str] = {}
        self._num_calls = 0

    def of_call(self, call_id: str, name: str) -> str:
        if self._form is IdForm.NAMED:
            self._names[call_id] = f"functions.{name}:{self._num_calls}"
            self._num_calls += 1
        return self.of_result(call_id)

    def of_result(self, call_id: str) -> str:
        """Equal ids stay equal."""
        if self._form is not IdForm.SHORT:
            return self._names.get(call_id, call_id)
        if len(call_id) == _SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_LENGTH]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template takes the calls of an assistant's message."""

    has_text_arguments: bool = False
    """Arguments are JSON as text, not an object: DeepSeek's templates append them to a text."""
    has_null_content: bool = False
    """A message without text has null, not an empty text: DeepSeek's templates ignore the calls of any other."""
    ids: IdForm = IdForm.GIVEN
    has_one_call: bool = False
    """A message has one call: gpt-oss's template ignores others, and Llama 3.1's rejects them."""
    has_one_text: bool = False
    """A message has text or reasoning: gpt-oss's template rejects both beside a call."""
    has_text_apart: bool = False
    """Text stands in a message of its own before the calls: DeepSeek's templates ignore calls beside text."""

    def message(self, fields: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
        """An assistant's message with its calls. `fields` are its other fields."""
        fields = self._one_text(fields) if self.has_one_text else fields
        content = fields.get("content") or (None if self.has_null_content else "")
        return {**fields, "content": content, "tool_calls": [self._call(*call) for call in calls]}

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a chat, with what the template takes in one. Where that is one call, each stands before its
        result."""
        divided: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        left: list[dict[str, Any]] = []
        for message in map(dict, messages):
            if message["role"] == "tool" and left:
                results.append(message)
                continue
            divided += _in_turn(left, results)
            left, results = [], []
            if self.has_text_apart and message.get("tool_calls") and message["content"]:
                divided.append({name: value for name, value in message.items() if name != "tool_calls"})
                message = self._alone(message, message["tool_calls"])
            if not self.has_one_call or len(message.get("tool_calls", ())) < 2:
                divided.append(message)
                continue
            first, *others = message["tool_calls"]
            left = [{**message, "tool_calls": [first]}, *(self._alone(message, [call]) for call in others)]
        return [*divided, *_in_turn(left, results)]

    def _alone(self, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A message with nothing but calls."""
        kept = {name: message[name] for name in ("role", "name") if name in message}
        return {**kept, "content": None if self.has_null_content else "", "tool_calls": calls}

    @staticmethod
    def _one_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        content = fields.get("content")
        names = [name for name in REASONING_FIELDS if fields.get(name)]
        if not content or not names:
            return fields
        return {**fields, "content": "", **{name: f"{fields[name]}\n\n{content}" for name in names}}

    def _call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        written = json.dumps(arguments, ensure_ascii=False) if self.has_text_arguments else arguments
        function = {"name": name, "arguments": written}
        return {**({"id": call_id} if call_id else {}), "type": "function", "function": function}


def _in_turn(calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of one call, each with the results that have its id after it; others come last."""
    left = list(results)
    messages = []
    for call in calls:
        call_id = call["tool_calls"][0].get("id")
        messages += [call, *(one for one in left if one.get("tool_call_id") == call_id)]
        left = [one for one in left if one.get("tool_call_id") != call_id]
    return [*messages, *left]


PROMPTED_CALLS = CallForm()
"""The form of calls that become text of messages."""


@dataclass(frozen=True, slots=True)
class ToolForms:
    """`takes_tools`: the prompt has the tools that a chat defines. `calls`: None where the prompt lacks the calls that
    its messages make. `needs_descriptions`: the template rejects tools and parameters without one; gpt-oss's does."""

    takes_tools: bool
    calls: CallForm | None
    needs_descriptions: bool = False

    @classmethod
    def of(cls, template: ChatTemplate, *, has_tools: bool = False) -> "ToolForms":
        """What a template takes. The calls are those of chats without tools, or with tools where these have a template
        of their own."""
        tools = None if template.for_chat(has_tools=has_tools) is template else [_tool("other_tool", "other_argument")]
        forms = (CallForm(*flags) for flags in product((False, True), (False, True), IdForm))
        described, bare = _tool(_NAME, _ARGUMENT), _without_descriptions(_tool(_NAME, _ARGUMENT))
        takes_tools = _NAME in _rendered(template, [_USER], [described])
        form = next((form for form in forms if _is_taken(template, form, tools)), None)
        return cls(
            takes_tools,
            None if form is None else _with_limits(template, form, tools),
            takes_tools and _NAME not in _rendered(template, [_USER], [bare]),
        )

    def written(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The tools of a chat as the template takes them."""
        return [_described(tool) for tool in tools] if self.needs_descriptions else list(tools)


def _tool(name: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": "c"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def _without_descriptions(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    properties = {name: {"type": "string"} for name in function["parameters"]["properties"]}
    parameters = {**function["parameters"], "properties": properties}
    return {**tool, "function": {"name": function["name"], "parameters": parameters}}


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with a description, and one of each parameter: an empty one where there is none."""
    function = tool["function"]
    parameters = function["parameters"]
    properties = parameters.get("properties")
    if isinstance(properties, Mapping):
        described = {
            name: {"description": "", **({} if schema is True else schema)}
            for name, schema in properties.items()
            if schema is True or isinstance(schema, Mapping)
        }
        parameters = {**parameters, "properties": {**properties, **described}}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _is_taken(template: ChatTemplate, form: CallForm, tools: Sequence[Mapping[str, Any]] | None) -> bool:
    before, text = _rendered(template, [_USER], tools), _with_calls(template, form, tools, _NAME)
    # Python's notation of null and of an object; JSON that is quoted once more.
    wrong = ("None", f"'{_ARGUMENT}'", f'\\"{_ARGUMENT}\\"')
    return _NAME in text and _ARGUMENT in text and all(text.count(one) <= before.count(one) for one in wrong)


def _with_limits(template: ChatTemplate, form: CallForm, tools: Sequence[Mapping[str, Any]] | None) -> CallForm:
    """The form with what a message may not have beside a call."""
    names = (_NAME, f"second_{_NAME}")
    reasoning_fields = template.for_chat(has_tools=tools is not None).reasoning_fields

    def has_call(**texts: str) -> bool:
        return _NAME in _with_calls(template, form, tools, _NAME, **texts)

    return replace(
        form,
        has_one_call=names[1] not in _with_calls(template, form, tools, *names),
        has_one_text=has_call(content="a") and not has_call(content="a", **dict.fromkeys(reasoning_fields, "b")),
        has_text_apart=not has_call(content="a"),
    )


def _with_calls(
    template: ChatTemplate, form: CallForm, tools: Sequence[Mapping[str, Any]] | None, *names: str, **texts: str
) -> str:
    """A chat with calls and their results."""
    ids = CallIds(form.ids)
    calls = [(ids.of_call(f"{_ID}{index}", name), name, {_ARGUMENT: "x"}) for index, name in enumerate(names)]
    results = [{"role": "tool", "tool_call_id": call_id, "name": "b", "content": "c"} for call_id, *_ in calls]
    return _rendered(template, [_USER, form.message({"role": "assistant", **texts}, calls), *results], tools)


def _rendered(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """A chat; an empty text where the template rejects it."""
    try:
        return template.render(TemplateChat(messages, tools, prompt_end=PromptEnd.MESSAGE))
    except ChatTemplateError:
        return ""
