"""Messages of any descriptor, for hypothesis, and bytes that are nearly messages."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

_MAX_FIELDS = 5
_MAX_DEPTH = 6
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["\0", "😀" * 300, "e\u0301" * 100, "\u202e\ufeff", "<|im_end|>", "[" * 2000, "a" * 3_000]
)


class Likely:
    """What most messages have. The representation is short, because hypothesis shows the arguments of strategies."""

    def __init__(self, values: Mapping[str, SearchStrategy[Any]], parts: frozenset[str] = frozenset()) -> None:
        """`values` of fields by name; of a repeated field its items, of a map its keys. `parts` name messages."""
        self.values = values
        self.parts = parts

    def __repr__(self) -> str:
        return f"Likely({', '.join(self.values)})"

    def has(self, field: FieldDescriptor) -> bool:
        """Whether most messages have this field."""
        return field.name in self.values or field.name in self.parts


_UNLIKELY = Likely({})


def _integers(least: int, most: int) -> SearchStrategy[int]:
    edges = {least, least + 1, -1, 0, 1, 2, 2**15, 2**31 - 1, most - 1, most}
    return st.sampled_from(sorted(edge for edge in edges if least <= edge <= most)) | st.integers(least, most)


_VALUES: Mapping[int, SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: _TEXT,
}


@st.composite
def messages(draw: DrawFn, descriptor: Descriptor, likely: Likely) -> Message:
    """Messages of a type."""
    message = GetMessageClass(descriptor)()
    _fill(draw, message, likely, _MAX_DEPTH)
    return message


@st.composite
def encodings(draw: DrawFn, message: Message) -> bytes:
    """The bytes of a message; some of them cut, changed, or with fields that it does not have."""
    data = message.SerializeToString()
    place = draw(st.integers(0, len(data)))
    match draw(st.integers(0, 9)):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + draw(st.binary(min_size=1, max_size=4)) + data[place + 1 :]
        case 2:
            return data + draw(st.sampled_from([b"\xfa\x7f\x01a", b"\x0b" * 200, b"\xff" * 11, data]))
        case 3:
            return draw(st.binary(max_size=60))
    return data


def _fill(draw: DrawFn, message: Message, likely: Likely, depth: int) -> None:
    """Sets some fields: of most messages the likely ones and at most two others, of some any."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)  # of one of the two types of descriptors
    if not fields:
        return
    chosen = draw(st.lists(st.sampled_from(fields), max_size=_MAX_FIELDS, unique_by=lambda field: field.name))
    if draw(st.integers(0, 7)):
        chosen = chosen[:2] + [field for field in fields if likely.has(field) and draw(st.integers(0, 3))]
    else:
        likely = _UNLIKELY
    for field in chosen:
        _set(draw, message, field, likely, depth)


def _set(draw: DrawFn, message: Message, field: FieldDescriptor, likely: Likely, depth: int) -> None:
    name = field.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_entries(draw, getattr(message, name), field, likely, depth)
    elif field.is_repeated:
        _add_items(draw, getattr(message, name), field, likely, depth)
    elif field.message_type is None:
        setattr(message, name, draw(_value(field, likely)))
    elif depth:
        part = getattr(message, name)
        part.SetInParent()
        _fill(draw, part, likely, depth - 1)


def _add_items(draw: DrawFn, items: Any, field: FieldDescriptor, likely: Likely, depth: int) -> None:
    if field.message_type is None:
        values = draw(st.lists(_value(field, likely), max_size=4))
        items.extend(values * draw(st.sampled_from([1, 1, 1, 1, 1, 500])))
    elif depth:
        for _ in range(draw(st.integers(1, 3))):
            _fill(draw, items.add(), likely, depth - 1)


def _set_entries(draw: DrawFn, entries: Any, field: FieldDescriptor, likely: Likely, depth: int) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(likely.values.get(field.name, _value(key, _UNLIKELY)))
        if value.message_type is None:
            entries[name] = draw(_value(value, _UNLIKELY))
        elif depth:
            _fill(draw, entries[name], likely, depth - 1)


def _value(field: FieldDescriptor, likely: Likely) -> SearchStrategy[Any]:
    if field.name in likely.values:
        return likely.values[field.name]
    if field.enum_type is not None:
        numbers = [value.number for value in field.enum_type.values]
        return st.sampled_from([*numbers, 99, -1])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    return _VALUES[field.cpp_type]
