"""What a schema says of a string, as regular expressions of llguidance for the plain text of it."""

import re
from collections.abc import Mapping
from typing import Any

from gateway_svc.json_schemas import DAY_OF_ITS_YEAR
from gateway_svc.message_formats.parameter_values import UnsupportedParameters

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,6}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DAY = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-9]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_URL = r"([A-Za-z0-9._~!$&'()*+,;=:@\/-]|%[0-9A-Fa-f]{2})*"

FORMATS: Mapping[str, tuple[str, ...]] = {
    "date": (_DAY, f"{DAY_OF_ITS_YEAR}(?s:.*)"),
    "date-time": (f"{_DAY}[Tt]{_TIME}", f"{DAY_OF_ITS_YEAR}(?s:.*)"),
    "email": (rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}",),
    "hostname": (_HOST,),
    "ipv4": (rf"{_BYTE}(\.{_BYTE}){{3}}",),
    "time": (_TIME,),
    "uri": (rf"[A-Za-z][A-Za-z0-9+.-]*:\/\/{_HOST}(:[0-9]{{1,5}})?(\/{_URL})?(\?{_URL})?(#{_URL})?",),
    "uuid": ("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",),
}
"""Regular expressions of which a text of a format matches all. They leave out rare ones: an `email` has no quotes, and
a `uri` has a host by name."""

# A part of a regular expression, as far as anchors and alternatives are concerned.
_PART = re.compile(
    r"(?P<class>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<escape>\\.)|(?P<open>\()|(?P<close>\))|(?P<anchor>[\^$])|(?P<or>\|)|.",
    re.DOTALL,
)
_LOOKING = re.compile(r"\\[bBAzZG]|\(\?<?[=!]")


def string_expression(schema: Mapping[str, Any], where: str) -> str | None:
    """What a string must match, in Lark's syntax; None: nothing. Raises UnsupportedParameters."""
    for keyword in ("not", "if"):
        if keyword in schema:
            raise UnsupportedParameters(f"{where}: {keyword} is not supported with this model's calls")
    parts = []
    if "pattern" in schema:
        parts.append(_searched(schema["pattern"], where))
    if "format" in schema:
        regexes = FORMATS.get(schema["format"]) if isinstance(schema["format"], str) else None
        if regexes is None:
            raise UnsupportedParameters(
                f"{where}: the format {schema['format']!r} is not supported with this model's calls"
            )
        parts += regexes
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for keyword, length in (("minLength", least), ("maxLength", most)):
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 0):
            raise UnsupportedParameters(f"{where}: {keyword} must be an integer of at least 0")
    if most is not None and most < least:
        raise UnsupportedParameters(f"{where}: maxLength must not be below minLength")
    if least or most is not None:
        parts.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    return " & ".join(f"/{part}/" for part in parts) or None


def _searched(pattern: Any, where: str) -> str:
    """A regular expression, which a schema searches for, for a whole text."""
    from llguidance import regex_to_lark

    if not isinstance(pattern, str):
        raise UnsupportedParameters(f"{where}: pattern must be a string")
    if found := _LOOKING.search(pattern):
        raise UnsupportedParameters(f"{where}: {found[0]} in pattern is not supported with this model's calls")
    depth, anchors, has_alternatives = 0, [], False
    for part in _PART.finditer(pattern):
        depth += {"open": 1, "close": -1}.get(part.lastgroup or "", 0)
        has_alternatives |= part.lastgroup == "or" and depth == 0
        if part.lastgroup == "anchor":
            anchors.append(part.start())
    begins = 0 in anchors and pattern[0] == "^"
    ends = len(pattern) - 1 in anchors and pattern[-1] == "$"
    if len(anchors) > begins + ends or (anchors and has_alternatives):
        raise UnsupportedParameters(
            f"{where}: ^ and $ in pattern are supported only around the whole of it with this model's calls"
        )
    inner = regex_to_lark(pattern[begins : len(pattern) - ends], "dw")
    return f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}"
