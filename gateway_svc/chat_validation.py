"""Validates chats of both protocols, and makes of them what templates take."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gateway_svc.chat_template import ChatTemplate, TemplateChat
from gateway_svc.chats import (
    MAX_TOOLS,
    ChatMessage,
    ChatPrompt,
    ClientTool,
    CustomInput,
    PromptEnd,
    ToolCall,
    ToolChoice,
    ToolMode,
    check_num_calls,
    check_num_tools,
)
from gateway_svc.constraint_checks import check_length
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field
from gateway_svc.message_formats.description import CUSTOM_INPUT, MessageFormat
from gateway_svc.message_formats.prompted import prompted_messages
from gateway_svc.tool_forms import PROMPTED_CALLS, Call, CallForm, ToolForms
from svc_common.errors import QuireError, Reason

MAX_TOOLS_LENGTH = 2**18
MAX_VARIABLES_LENGTH = 2**18
MAX_NAME_LENGTH = 256
MAX_JSON_DEPTH = 100
MAX_REASONING_TOKENS = 2**31 - 1

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
TOOL_NAME_RULE = "must be 1 to 64 letters, digits, '_' or '-'"

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
# As templates name the switch of reasoning.
_SWITCHES = ("enable_thinking", "thinking")


class ChatValidator:
    """Validates the chats of one model. `roles` are all that messages may have."""

    def __init__(self, template: ChatTemplate, roles: Sequence[str], message_format: MessageFormat) -> None:
        self.message_format = message_format
        self._template = template
        self._forms, self._forms_with_tools = ToolForms.of(template), ToolForms.of(template, has_tools=True)
        # Templates write a role as it is, and may make a control token of it.
        self._roles = roles

    def template_chat(self, prompt: ChatPrompt, check: FieldChecker) -> TemplateChat:
        """The chat as the template takes it. Takes long where there is much JSON. Raises QuireError."""
        tools = self._tools(prompt, check)
        writes_tools = bool(tools) and self._forms.takes_tools
        template = self._template.for_chat(has_tools=writes_tools)
        call_form = (self._forms_with_tools if writes_tools else self._forms).calls
        tool_format = self.message_format.tools
        form = PROMPTED_CALLS if call_form is None and tool_format is not None else call_form
        messages = [self._message(message, template, form, check) for message in prompt.messages]
        if tool_format is not None:
            if call_form is None and any(map(_has_calls, messages)):
                messages = prompted_messages(messages, (), tool_format)
            if tools and not writes_tools:
                num_system = int(messages[0]["role"] == "system")
                system = prompted_messages(messages[:num_system], tools, tool_format)
                messages = [*system, *messages[num_system:]]
        last = prompt.messages[-1]
        if prompt.prompt_end is PromptEnd.CONTINUATION and (last.role != "assistant" or not last.content):
            raise check.invalid(Field.PROMPT_END, "needs a last message of the role assistant with a content")
        check.integer(Field.MAX_REASONING_TOKENS, prompt.max_reasoning_tokens, 0, 0, MAX_REASONING_TOKENS)
        has_one_call = prompt.parallel_tool_calls is False
        variables = self._variables(prompt, check)
        return TemplateChat(
            messages,
            tools if writes_tools else None,
            variables,
            prompt.prompt_end,
            callable_tools=tools,
            custom_tools=frozenset(tool.name for tool in prompt.tools if tool.custom is not None),
            has_one_call=has_one_call,
            must_call=prompt.tool_choice is not None and prompt.tool_choice.must_call,
            add_special_tokens=prompt.add_special_tokens,
        )

    def _message(
        self, message: ChatMessage, template: ChatTemplate, form: CallForm | None, check: FieldChecker
    ) -> dict[str, Any]:
        if message.role not in self._roles:
            raise _invalid(message.place("role"), f"must be {', '.join(self._roles[:-1])} or {self._roles[-1]}")
        texts = {"content": message.content, "reasoning": message.reasoning}
        names = {"name": message.name, "tool_call_id": message.tool_call_id}
        for name, text in {**texts, **names}.items():
            if text is not None:
                check.unicode(message.place(name), text)
        for name, text in names.items():
            if text is not None and not 1 <= len(text) <= MAX_NAME_LENGTH:
                raise _invalid(message.place(name), f"must have between 1 and {MAX_NAME_LENGTH} characters")
        fields: dict[str, Any] = {"role": template.role(message.role), "content": message.content or ""}
        if message.name is not None:
            fields["name"] = message.name
        if message.reasoning is not None:
            fields["reasoning_content"] = message.reasoning
        if message.tool_call_id is not None:
            fields["tool_call_id"] = form.id(message.tool_call_id) if form else message.tool_call_id
        if not message.tool_calls:
            return fields
        if message.role != "assistant":
            raise _invalid(message.place("tool_calls"), "needs the role assistant")
        check_num_calls(len(message.tool_calls), message.place("tool_calls"))
        if form is None:
            raise _unsupported(message.place("tool_calls"), "this model has no format of calls")
        return form.message(fields, [_call(call, check) for call in message.tool_calls])

    def _tools(self, prompt: ChatPrompt, check: FieldChecker) -> list[dict[str, Any]]:
        """The tools that the answer may call."""
        choice = prompt.tool_choice or ToolChoice()
        tools = prompt.tools
        if not tools:
            if choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED) or choice.allowed:
                raise check.invalid(Field.TOOL_CHOICE, "needs tools")
            return []
        check_num_tools(len(tools), check.field_path(Field.TOOLS))
        if sum(tool.length for tool in tools) > MAX_TOOLS_LENGTH:
            raise check.invalid(Field.TOOLS, f"must have at most {MAX_TOOLS_LENGTH} characters")
        checked = [_tool(tool, check) for tool in tools]
        names = set[str]()
        for tool in tools:
            if tool.name in names:
                raise _invalid(tool.place("name"), "is there twice")
            names.add(tool.name)
        if choice.mode is ToolMode.NAMED and choice.name not in names:
            raise check.invalid(Field.TOOL_CHOICE, "names none of the tools")
        if len(choice.allowed) > MAX_TOOLS:
            raise check.invalid(Field.TOOL_CHOICE, f"must name at most {MAX_TOOLS} tools")
        if not names.issuperset(choice.allowed):
            raise check.invalid(Field.TOOL_CHOICE, "names a tool that is none of the tools")
        if choice.mode is ToolMode.NONE:
            return []
        if self.message_format.tools is None:
            raise check.unsupported(Field.TOOLS, "this model has no format of calls")
        return checked

    def _variables(self, prompt: ChatPrompt, check: FieldChecker) -> dict[str, Any]:
        """Variables for the template beside messages and tools."""
        variables = self._effort(prompt.reasoning_effort, check)
        if prompt.template_variables is None:
            return variables
        check_variables_length(check.field_path(Field.TEMPLATE_VARIABLES), prompt.template_variables)
        given = _json_object(check.field_path(Field.TEMPLATE_VARIABLES), prompt.template_variables, check)
        for name in given:
            if name in self._template.own_variables:
                raise check.invalid(Field.TEMPLATE_VARIABLES, f"must not have {name}, which the template has already")
        if (documents := given.get("documents")) is not None:
            if not isinstance(documents, list) or not all(isinstance(one, dict) for one in documents):
                raise check.invalid(Field.TEMPLATE_VARIABLES, "documents must be a list of objects")
            if "documents" not in self._template.variables:
                raise check.unsupported(Field.TEMPLATE_VARIABLES, "this model's chat template takes no documents")
        return variables | given

    def _effort(self, effort: str | None, check: FieldChecker) -> dict[str, Any]:
        if effort is None:
            return {}
        if effort not in EFFORTS:
            raise check.invalid(Field.REASONING_EFFORT, f"must be {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}")
        values = {"reasoning_effort": effort} | dict.fromkeys(_SWITCHES, effort != "none")
        # Frameworks send it for each model, so it has no effect where the template reads none of them.
        return {name: value for name, value in values.items() if name in self._template.variables}


def check_variables_length(where: str, variables: str) -> None:
    """Rejects variables of the template, which are at `where`, with more characters than they may have. Raises
    QuireError."""
    if len(variables) > MAX_VARIABLES_LENGTH:
        raise _invalid(where, f"must have at most {MAX_VARIABLES_LENGTH} characters")


def _has_calls(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _tool(tool: ClientTool, check: FieldChecker) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    if not TOOL_NAME.fullmatch(tool.name):
        raise _invalid(tool.place("name"), TOOL_NAME_RULE)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        check.unicode(tool.place("description"), tool.description)
        function["description"] = tool.description
    # Templates read its properties.
    function["parameters"] = _NO_PARAMETERS
    if tool.custom is not None:
        for name, is_given in (("parameters", tool.parameters is not None), ("strict", tool.is_strict)):
            if is_given:
                raise _invalid(tool.place(name), "must not be set for a custom tool")
        function["parameters"] = _input_parameters(tool.custom, check)
    elif tool.parameters is not None:
        function["parameters"] = _json_object(tool.place("parameters"), tool.parameters, check)
    return {"type": "function", "function": function}


def _input_parameters(custom: CustomInput, check: FieldChecker) -> dict[str, Any]:
    """The schema of a custom tool, with its grammar for the model to read."""
    described: dict[str, Any] = {"type": "string"}
    if custom.constraint is not None:
        check_length(custom.path, len(custom.constraint.text))
        check.unicode(custom.path, custom.constraint.text)
        kind = "regular expression" if custom.constraint.field is Field.REGEX else "Lark grammar"
        described["description"] = f"Text that matches this {kind}:\n{custom.constraint.text}"
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: described},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def _call(call: ToolCall, check: FieldChecker) -> Call:
    for name, text in (("id", call.id), ("name", call.name)):
        check.unicode(call.place(name), text)
        if len(text) > MAX_NAME_LENGTH:
            raise _invalid(call.place(name), f"must have at most {MAX_NAME_LENGTH} characters")
    if not call.name:
        raise _invalid(call.place("name"), "must not be empty")
    if call.input is not None:
        if call.arguments:
            raise _invalid(call.place("input"), "must not be beside arguments")
        check.unicode(call.place("input"), call.input)
        return call.id, call.name, {CUSTOM_INPUT: call.input}
    # Clients send back what a model wrote: nothing, for a function that has no arguments; or a text that `max_tokens`
    # has cut, without which a conversation could not go on.
    return call.id, call.name, _json_object(call.place("arguments"), call.arguments, check, not_json={})


def _json_object(
    where: str, text: str, check: FieldChecker, *, not_json: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The value of a text. One that is not JSON is `not_json`, or an error."""
    check.unicode(where, text)
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise _invalid(where, f"has more than {MAX_JSON_DEPTH} levels") from None
    except ValueError:
        if not_json is not None:
            return not_json
        raise _invalid(where, "is not JSON") from None
    if not isinstance(value, dict):
        raise _invalid(where, "must be a JSON object")
    left: list[tuple[int, Any]] = [(0, value)]
    while left:
        depth, item = left.pop()
        if isinstance(item, str):
            check.unicode(where, item)  # an escape may be half a surrogate pair
        elif isinstance(item, dict | list):
            if depth == MAX_JSON_DEPTH:
                raise _invalid(where, f"has more than {MAX_JSON_DEPTH} levels")
            inner = [*item, *item.values()] if isinstance(item, dict) else item
            left += ((depth + 1, one) for one in inner)
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _invalid(where: str, message: str) -> QuireError:
    return QuireError(Reason.INVALID_FIELD, message, field=where)


def _unsupported(where: str, message: str) -> QuireError:
    return QuireError(Reason.FEATURE_UNSUPPORTED, message, field=where)
