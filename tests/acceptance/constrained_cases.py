"""The schemas and regular expressions of the constrained requests, and the check of what was generated under them.

jsonschema and re decide whether a text is valid. A text that was cut is a valid prefix if some valid text begins with
it: llguidance proposes the rest, and jsonschema and re check the whole. Nothing of Quire takes part.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from tokenizers import Tokenizer

from svc_common.models import eos_token_ids_of

_CASES = Path(__file__).with_name("constrained_cases.json")
_NUM_TRIES, _MAX_REST = 20, 400  # texts that may be tried to complete a cut one; tokens of each
# What ends strings, objects and arrays, or begins the shortest values.
_ENDS = ('"', "}", "]", "null", "0", "1", "@", ".", "c")
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_DURATION = r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"


def _format_checker() -> jsonschema.FormatChecker:
    """That of jsonschema, with the formats that it checks only with other packages."""
    checker = jsonschema.FormatChecker()

    def check(name: str, pattern: str) -> None:
        compiled = re.compile(pattern, re.ASCII | re.IGNORECASE)
        checker.checks(name)(lambda value: not isinstance(value, str) or compiled.fullmatch(value) is not None)

    check("time", _TIME)
    check("duration", _DURATION)
    check("hostname", rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")

    def is_date(value: object) -> bool:
        if isinstance(value, str):
            # RFC 3339 has the year 0, a leap year; Python has not.
            date.fromisoformat("2000" + value[4:] if value.startswith("0000") else value)
        return True

    def is_date_time(value: object) -> bool:
        if not isinstance(value, str):
            return True
        day, _, time = value.upper().partition("T")
        return is_date(day) and re.fullmatch(_TIME, time, re.ASCII) is not None

    checker.checks("date", raises=ValueError)(is_date)
    checker.checks("date-time", raises=ValueError)(is_date_time)
    return checker


@dataclass(frozen=True)
class ConstraintCase:
    """A constraint: its name, the option of a request that states it, its grammar, and the check of a whole text."""

    name: str
    option: dict[str, Any]
    grammar: str
    is_valid: Callable[[str], bool]


def _not_json(name: str) -> Any:
    raise ValueError(name)


def _schema_case(name: str, schema: dict[str, Any], checker: jsonschema.FormatChecker) -> ConstraintCase:
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)

    def is_valid(text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=_not_json)
        except ValueError:
            return False
        return bool(validator.is_valid(value))

    return ConstraintCase(name, {"json_schema": schema}, f"start: %json {json.dumps(schema)}", is_valid)


def _regex_case(regex: str) -> ConstraintCase:
    compiled = re.compile(regex, re.ASCII)
    grammar = f"start: /{regex_to_lark(regex, 'dw')}/"  # classes are ASCII, as here
    return ConstraintCase(regex, {"regex": regex}, grammar, lambda text: compiled.fullmatch(text) is not None)


def load_cases() -> list[ConstraintCase]:
    """All constraints: 40 schemas and 20 regular expressions."""
    kept, checker = json.loads(_CASES.read_text()), _format_checker()
    schemas = [_schema_case(name, schema, checker) for name, schema in kept["schemas"].items()]
    return schemas + [_regex_case(regex) for regex in kept["regexes"]]


class Judge:
    """Checks output tokens under a constraint."""

    def __init__(self, model: Path) -> None:
        """`model` is the directory with the tokenizer."""
        text = (model / "tokenizer.json").read_text()
        self._tokenizer = Tokenizer.from_str(text)
        self._eos = eos_token_ids_of(model)
        self._vocabulary = LLTokenizer(text, eos_token=self._eos)
        self._ends = [token for end in _ENDS if (token := self._tokenizer.token_to_id(end)) is not None]
        self._start = cache(self._matcher)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of output tokens."""
        decoded: str = self._tokenizer.decode(list(tokens))
        return decoded

    def is_prefix(self, case: ConstraintCase, tokens: Sequence[int]) -> bool:
        """Whether a valid text begins with these tokens."""
        matcher = self._start(case.grammar).deep_copy()
        if not matcher.consume_tokens(list(tokens)):
            return False
        rests = (self._rest(matcher.deep_copy(), random.Random(number)) for number in range(_NUM_TRIES))
        return any(rest is not None and case.is_valid(self.text([*tokens, *rest])) for rest in rests)

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _rest(self, matcher: LLMatcher, rng: random.Random) -> list[int] | None:
        """Tokens until the text may end; None if it does not."""
        rest: list[int] = []
        takes_first = rng.random() < 0.5
        while len(rest) < _MAX_REST:
            if matcher.is_accepting():
                return rest
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            ends = [token for token in self._ends if token in allowed]
            if ends and rng.random() < 0.9:
                rest.append(ends[0] if takes_first else rng.choice(ends))
            else:
                rest.append(int(rng.choice(allowed)))
            if not matcher.consume_token(rest[-1]):
                return None
        return None
