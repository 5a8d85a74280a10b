"""Descriptions of message formats: plain values that the parser, the grammar and the writer of calls read.

A *marker* is a text that structures a turn, such as `<tool_call>`. Where the tokenizer has a token of that literal,
only the token is the marker, and the same characters in text are text. Where it has none, the characters are the
marker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

CUSTOM_INPUT = "input"
"""The parameter of custom tools: each is a function with one, a text."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments, an object.

    `is_custom`: its one parameter is a text, which a client gets in place of arguments. `input_grammar` is what that
    text matches, in Lark's syntax; None: any text.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    is_custom: bool = False
    input_grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Channels:
    """A turn of messages, each with a header before its text: `start`, a role, `channel`, the name of a channel, and
    `message`. The role or the channel of a call is followed by `recipient` with the name of a function after
    `namespace`, and the channel by the type of its arguments, which `constrain` may precede.

    The prompt ends with the role, so the first header lacks what stands before. Models vary headers: each text up to
    `message` is one, in which a recipient makes a call and the channel `reasoning` reasoning; all others are text.
    `words` are what headers consist of otherwise, and `ends` the markers after a message.
    """

    start: str
    channel: str
    message: str
    constrain: str
    ends: tuple[str, ...]
    reasoning: str
    recipient: str
    namespace: str
    words: tuple[str, ...]

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (self.start, self.channel, self.message, self.constrain, *self.ends)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands first in a turn, between two markers. A template may write `begin` at the end of the prompt.

    `answer` are two markers around what follows, or none; an answer without them is one too. With `marks_each_answer`
    they may also come without reasoning, which a template may write into the prompt; otherwise they are text there.
    With `channels` the turn is read by the headers of its messages: then the markers are texts of several, as a model
    usually writes them, and `next` is what stands between two messages. `preamble` begins text before calls, if another
    marker does. `heading` is a word after `begin` that is no part of the reasoning. A template with the text `unless`
    has the markers for something else.
    """

    name: str
    begin: str
    end: str
    answer: tuple[str, ...] = ()
    marks_each_answer: bool = False
    next: str = ""
    preamble: str = ""
    heading: str = ""
    unless: str = ""
    channels: Channels | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (self.begin, self.end, *self.answer) if self.channels is None else self.channels.markers

    def is_open_in(self, prompt: str, answer: str = "") -> bool:
        """Whether a rendered prompt ends within the reasoning, so that the output continues it. `answer` is the part of
        the answer that the prompt has; `prompt` may lack all but its end."""
        rest = answer.lstrip()
        while rest.startswith(self.begin):
            _, end, rest = rest.partition(self.end)
            if not end:
                return True
            rest = rest.lstrip()
        return prompt.rstrip().endswith((self.begin, f"{self.begin}{self.heading}"))


class Listing(Enum):
    """How a model writes several JSON calls. The parser takes either."""

    ARRAY = "array"
    """One JSON array of all calls, between one pair of markers."""
    REPEATED = "repeated"
    """One object after another, each with its markers if there are any."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`{"name": …, "arguments": {…}}` between markers.

    With `is_bare`, calls may stand without `begin`, as the whole turn or after reasoning. Such calls must name a tool
    of the request, since any JSON object may have such fields. `end` is None where nothing follows the calls.
    `separator` is between calls of a turn, and `space` between markers and JSON. `array` is what stands before, between
    and after the calls of an array. `number_key` comes first in a call, with its number as a text. Without `name_key`,
    the name is the key of the arguments.
    """

    begin: str | None = None
    end: str | None = None
    is_bare: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    number_key: str = ""
    listing: Listing = Listing.REPEATED
    separator: str = "\n"
    space: str = ""
    array: tuple[str, str, str] = ("[", ", ", "]")

    line_begin = None

    @property
    def begins(self) -> tuple[str, ...]:
        return () if self.begin is None else (self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return tuple(marker for marker in (self.begin, self.end) if marker is not None)


class Slot(Enum):
    """A place in the pattern of a call."""

    NAME = "name"
    NUMBER = "number"
    """Of the call, from 0 on. It has no meaning here."""
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """The name as plain text, and then the arguments as a JSON object.

    `call` is the pattern of one call: the slots, markers, and other literals, which do not begin with a bracket. White
    space around literals is written as it stands here, and is optional when parsed. `begin` and `end` are around all
    calls; where `end` is None, each call begins with `begin`. `ignored` are markers that may follow the name, each with
    a word that has no meaning here. With `channels`, calls are read by the headers of messages: the pattern is what a
    model usually writes, and its literals are texts of several markers. `namespace` stands before the name, and with
    `is_numbered` a colon and the number of the call after it; both may be missing.
    """

    begin: str
    call: tuple[str | Slot, ...]
    end: str | None = None
    separator: str = ""
    ignored: tuple[str, ...] = ()
    channels: Channels | None = None
    namespace: str = ""
    is_numbered: bool = False

    is_bare = False
    line_begin = None

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        if self.channels is not None:
            return self.channels.markers
        in_call = tuple(part for part in self.call if isinstance(part, str) and part[0] in "<[")
        return (self.begin, *in_call, *self.ignored, *(() if self.end is None else (self.end,)))


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Tags for the function and for each parameter. Values are plain text; the parameter's schema says which type.

    A value of a type other than string is JSON. `value_break` stands after the opening and before the closing tag of a
    parameter, and is not part of the value. Models leave tags out: a call of a tool of the request may begin with the
    tag of its function at the beginning of a line, and a value ends before a line with the next parameter, or with the
    end of the function if the end of the calls or another function follows.

    Without `function`, the name follows `begin`, and `end` ends the function. `name_end` and `key_end` follow the names
    of functions and parameters; there may be white space between the parts of the latter. `has_token_tags`: the tags of
    parameters are markers. `is_grouped`: several functions stand between `begin` and `end`.
    """

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    function: str = "<function="
    name_end: str = ">"
    function_end: str = "</function>"
    parameter: str = "<parameter="
    key_end: tuple[str, ...] = (">",)
    parameter_end: str = "</parameter>"
    value_break: str = "\n"
    has_token_tags: bool = False
    is_grouped: bool = False

    is_bare = False

    @property
    def line_begin(self) -> str | None:
        """What begins a call at the beginning of a line."""
        return self.function or None

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def last_tag(self) -> str:
        """What follows the parameters."""
        return self.function_end or self.end

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers. Other tags are text in every tokenizer."""
        tags = (self.parameter, *self.key_end, self.parameter_end) if self.has_token_tags else ()
        return (self.begin, self.end, *tags)

    def opening(self, parameter: str) -> str:
        """What stands before the value of a parameter."""
        return f"{self.parameter}{parameter}{self.after_key}"

    @property
    def after_key(self) -> str:
        return "\n".join(self.key_end) + self.value_break

    @property
    def closing(self) -> str:
        """What stands after a value."""
        return f"{self.value_break}{self.parameter_end}\n"


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A Python list of calls with keyword arguments, which are literals: `[get_weather(city="Rome", days=2)]`.

    With `is_bare` they may stand without markers, as the whole turn or after reasoning, as JsonCalls may. Without
    `is_list`, each call is a line between the markers.
    """

    begin: str
    end: str
    is_bare: bool = True
    is_list: bool = True

    line_begin = None

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (self.begin, self.end)


@dataclass(frozen=True, slots=True)
class BraceCalls:
    """The name after `prefix`, then the arguments in braces, as JSON with bare keys. Strings stand between two `quote`,
    and have no escapes."""

    begin: str
    end: str
    quote: str
    prefix: str = "call:"

    is_bare = False
    line_begin = None

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (self.begin, self.end, self.quote)


CallSyntax = JsonCalls | NamedCalls | XmlCalls | PythonCalls | BraceCalls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls. `signs` are texts of which all stand in a template of this family."""

    name: str
    calls: CallSyntax
    signs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How one model writes a turn. None: it has no calls, or no reasoning; what looks like them is text."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> frozenset[str]:
        """All markers."""
        calls = () if self.tools is None else self.tools.calls.markers
        reasoning = () if self.reasoning is None else self.reasoning.markers
        return frozenset((*calls, *reasoning))

    @property
    def channels(self) -> Channels | None:
        """Those of the turn, if it consists of messages with headers."""
        return self._channels_of_calls if self.reasoning is None else self.reasoning.channels

    @property
    def is_consistent(self) -> bool:
        """Whether one model may write both."""
        return self.tools is None or self.reasoning is None or self._channels_of_calls is self.reasoning.channels

    @property
    def _channels_of_calls(self) -> Channels | None:
        calls = None if self.tools is None else self.tools.calls
        return calls.channels if isinstance(calls, NamedCalls) else None
