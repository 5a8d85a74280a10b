"""How a chat template takes tools and calls of tools, found by rendering it once with each way that templates have."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from gateway_svc.chat_template import ChatTemplate, ChatTemplateError, TemplateChat
from gateway_svc.chats import PromptEnd

_ID = "call_0123456789abcdef01234567"
_NAME = "probed_tool"
_ARGUMENT = "probed_argument"
_USER = {"role": "user", "content": "a"}
_SHORT_ID_LENGTH = 9

Call = tuple[str, str, Mapping[str, Any]]
"""Id, name and arguments of a call."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template takes the calls of an assistant's message."""

    has_text_arguments: bool
    """Arguments are JSON as text, not an object: DeepSeek's templates append them to a text."""
    has_null_content: bool
    """A message without text has null, not an empty text: DeepSeek's templates ignore the calls of any other."""
    has_short_ids: bool
    """Ids are 9 letters and digits: Mistral's templates reject others."""

    def message(self, fields: Mapping[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
        """An assistant's message with its calls. `fields` are its other fields."""
        content = fields.get("content") or (None if self.has_null_content else "")
        return {**fields, "content": content, "tool_calls": [self._call(*call) for call in calls]}

    def id(self, call_id: str) -> str:
        """The id of a call as the template takes it: equal ids stay equal."""
        if not self.has_short_ids or (len(call_id) == _SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_LENGTH]

    def _call(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        written = json.dumps(arguments, ensure_ascii=False) if self.has_text_arguments else arguments
        function = {"name": name, "arguments": written}
        return {**({"id": self.id(call_id)} if call_id else {}), "type": "function", "function": function}


PROMPTED_CALLS = CallForm(has_text_arguments=False, has_null_content=False, has_short_ids=False)
"""The form of calls that become text of messages."""


@dataclass(frozen=True, slots=True)
class ToolForms:
    """`takes_tools`: the prompt has the tools that a chat defines. `calls`: None where the prompt lacks the calls that
    its messages make."""

    takes_tools: bool
    calls: CallForm | None

    @classmethod
    def of(cls, template: ChatTemplate, *, has_tools: bool = False) -> "ToolForms":
        """What a template takes. The calls are those of chats without tools, or with tools where these have a template
        of their own."""
        tools = None if template.for_chat(has_tools=has_tools) is template else [_tool("other_tool", "other_argument")]
        forms = (CallForm(*flags) for flags in product((False, True), repeat=3))
        takes_tools = _NAME in _rendered(template, [_USER], [_tool(_NAME, _ARGUMENT)])
        return cls(takes_tools, next((form for form in forms if _is_taken(template, form, tools)), None))


def _tool(name: str, argument: str) -> dict[str, Any]:
    properties = {argument: {"type": "string", "description": "c"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def _is_taken(template: ChatTemplate, form: CallForm, tools: Sequence[Mapping[str, Any]] | None) -> bool:
    call = form.message({"role": "assistant"}, [(_ID, _NAME, {_ARGUMENT: "x"})])
    result = {"role": "tool", "tool_call_id": form.id(_ID), "name": "b", "content": "c"}
    before, text = _rendered(template, [_USER], tools), _rendered(template, [_USER, call, result], tools)
    # Python's notation of null and of an object; JSON that is quoted once more.
    wrong = ("None", f"'{_ARGUMENT}'", f'\\"{_ARGUMENT}\\"')
    return _NAME in text and _ARGUMENT in text and all(text.count(one) <= before.count(one) for one in wrong)


def _rendered(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """A chat; an empty text where the template rejects it."""
    try:
        return template.render(TemplateChat(messages, tools, prompt_end=PromptEnd.MESSAGE))
    except ChatTemplateError:
        return ""
