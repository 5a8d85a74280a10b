"""The items of a conversation: as clients list them, and as messages of a chat."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway_svc.chats import ChatMessage, ToolCall
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.responses.models import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputTextPart,
    MessageItem,
    ReasoningItem,
    UnservedItem,
)
from gateway_svc.http_api.responses.namespaces import model_name
from gateway_svc.http_api.responses.output_items import Json, item_id
from svc_common.errors import QuireError, Reason

_PREVIOUS = "previous_response_id"
_MAX_ID = 256  # characters

Item = (
    MessageItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | ReasoningItem
    | UnservedItem
)


def input_items(given: str | Sequence[Item], response_id: str, history: Sequence[Json] = ()) -> list[Json]:
    """Items as they are stored and listed, each with an id that no earlier one has, also not one of the history: lists
    are paged by ids. Raises QuireError."""
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given)]
    items, ids = [], {item["id"] for item in history}
    for index, one in enumerate(given):
        if not isinstance(one, UnservedItem) and one.id is not None:
            if len(one.id) > _MAX_ID:
                raise invalid(f"input[{index}].id", f"must have at most {_MAX_ID} characters")
            if one.id in ids:
                one = one.model_copy(update={"id": None})
        items.append(_item(one, index, response_id))
        ids.add(items[-1]["id"])
    return items


def without_logprobs(items: Sequence[Json]) -> list[Json]:
    """Items of an output as those of a history: no model reads log-probabilities, which have about 1 KB per token."""
    return [_without_logprobs(item) if item["type"] == "message" else item for item in items]


def _without_logprobs(message: Json) -> Json:
    return {**message, "content": [{**part, "logprobs": []} for part in message["content"]]}


def _item(one: Item, index: int, response_id: str) -> Json:
    place = f"input/{index}"
    match one:
        case MessageItem():
            kind = "output_text" if one.role == "assistant" else "input_text"
            content = [{"type": kind, "text": text} for text in _texts(one.content)]
            head = {"id": one.id or item_id("msg", response_id, place), "type": "message", "status": "completed"}
            return {**head, "role": one.role, "content": content}
        case FunctionCallItem():
            head = {"id": one.id or item_id("fc", response_id, place), "type": "function_call", "status": "completed"}
            namespace = {} if one.namespace is None else {"namespace": one.namespace}
            return {**head, "call_id": one.call_id, "name": one.name, **namespace, "arguments": one.arguments}
        case CustomCallItem():
            head = {"id": one.id or item_id("ctc", response_id, place), "type": one.type, "status": "completed"}
            return {**head, "call_id": one.call_id, "name": one.name, "input": one.input}
        case FunctionOutputItem():
            prefix = "ctco" if isinstance(one, CustomOutputItem) else "fco"
            head = {"id": one.id or item_id(prefix, response_id, place), "type": one.type}
            return {**head, "status": "completed", "call_id": one.call_id, "output": "\n".join(_texts(one.output))}
        case ReasoningItem():
            texts = [part.text for part in one.content or one.summary or ()]
            if not texts and one.encrypted_content is not None:
                where = f"input[{index}].encrypted_content"
                raise QuireError(Reason.FEATURE_UNSUPPORTED, "is not served without content or summary", field=where)
            reasoning = [{"type": "reasoning_text", "text": text} for text in texts]
            head = {"id": one.id or item_id("rs", response_id, place), "type": "reasoning", "status": "completed"}
            return {**head, "summary": [], "content": reasoning}
    raise AssertionError("the model refuses other items")


def _texts(content: str | Sequence[InputTextPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


# Fields of chats, by their names in the contract. Items of one turn of the assistant have their reasoning as content,
# and its calls are items themselves.
_WHOLE = {"content": ""}
_RESULT = {"content": "output", "tool_call_id": "call_id"}
_CALL = {"id": "call_id"}
_ANSWER = {"reasoning": "content", "tool_calls": ""}


def chat_messages(
    instructions: str | None, history: Sequence[Json], items: Sequence[Json], *, is_text: bool
) -> list[ChatMessage]:
    """A conversation as a chat. With `is_text` the items are one text of the user. Raises QuireError."""
    messages = _Messages()
    if instructions is not None:
        messages.add(ChatMessage("system", instructions, path="instructions", names=_WHOLE))
    for item in history:
        messages.add_item(item, _PREVIOUS)
    for index, item in enumerate(items):
        messages.add_item(item, "input" if is_text else f"input[{index}]", is_text=is_text)
    messages.end_turn()
    return messages.done


@dataclass(frozen=True, slots=True)
class Truncations:
    """A chat without its oldest messages, ever more of them, down to the last one. System messages at its beginning
    stay, and a call's result is not left without the call. Each chat is made when it is asked for: together they have
    as many messages as the square of the chat's."""

    messages: Sequence[ChatMessage]
    num_system: int
    starts: Sequence[int]
    """Where the messages after those of the system may begin."""

    @classmethod
    def of(cls, messages: Sequence[ChatMessage]) -> "Truncations":
        num_system = 0
        while num_system < len(messages) - 1 and messages[num_system].role in ("system", "developer"):
            num_system += 1
        starts = [index for index in range(num_system + 1, len(messages)) if messages[index].role != "tool"]
        return cls(messages, num_system, starts or [num_system])

    def __len__(self) -> int:
        return len(self.starts)

    def chat(self, index: int) -> list[ChatMessage]:
        """One of them; that of index 0 has the most messages."""
        return [*self.messages[: self.num_system], *self.messages[self.starts[index] :]]


@dataclass(slots=True)
class _AssistantTurn:
    """Reasoning, text and calls of one message. They stand in this order."""

    path: str
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class _Messages:
    """The messages so far. Items of one turn of the assistant become one message."""

    def __init__(self) -> None:
        self.done: list[ChatMessage] = []
        self._turn: _AssistantTurn | None = None
        self._names: dict[str, str] = {}  # of functions, by call

    def add(self, message: ChatMessage) -> None:
        self.end_turn()
        self.done.append(message)

    def add_item(self, item: Json, path: str, *, is_text: bool = False) -> None:
        """Adds an item at `path`; with `is_text` it is made of a text there. Raises QuireError."""
        match item["type"]:
            case "function_call_output" | "custom_tool_call_output":
                self._add_result(item, path)
            case "function_call":
                name = model_name(item.get("namespace"), item["name"])
                self._add_call(ToolCall(name, item["arguments"], item["call_id"], path, names=_CALL))
            case "custom_tool_call":
                name, text = item["name"], item["input"]
                self._add_call(ToolCall(name, id=item["call_id"], path=path, input=text, names=_CALL))
            case "reasoning":
                if item["content"]:  # other servers send no text of it
                    self._turn_without_text(path).reasoning += [part["text"] for part in item["content"]]
            case _ if item["role"] == "assistant":
                self._turn_without_text(path).content.append(_text_of(item))
            case _:
                self.add(ChatMessage(item["role"], _text_of(item), path=path, names=_WHOLE if is_text else {}))

    def _add_result(self, item: Json, path: str) -> None:
        call_id = item["call_id"]
        if call_id not in self._names:
            raise invalid(f"{path}.call_id", "is the call of no item before")
        self.add(ChatMessage("tool", item["output"], (), call_id, self._names[call_id], path=path, names=_RESULT))

    def _add_call(self, call: ToolCall) -> None:
        self._names[call.id] = call.name
        self._turn_at(call.path).calls.append(call)

    def end_turn(self) -> None:
        """Makes a message of the assistant's items so far."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        content = "".join(turn.content) if turn.content or not turn.calls else None
        reasoning = "\n".join(turn.reasoning) if turn.reasoning else None
        self.done.append(
            ChatMessage("assistant", content, tuple(turn.calls), reasoning=reasoning, path=turn.path, names=_ANSWER)
        )

    def _turn_at(self, path: str) -> _AssistantTurn:
        return self._turn if self._turn is not None else self._new_turn(path)

    def _turn_without_text(self, path: str) -> _AssistantTurn:
        """The turn so far if it has neither text nor calls, else a new one."""
        turn = self._turn_at(path)
        return self._new_turn(path) if turn.content or turn.calls else turn

    def _new_turn(self, path: str) -> _AssistantTurn:
        self.end_turn()
        self._turn = _AssistantTurn(path)
        return self._turn


def _text_of(item: Json) -> str:
    # Templates take one text: parts are joined by line breaks, as in chats.
    return "\n".join(part["text"] for part in item["content"])
