"""Reads the flags of `vllm serve`: each sets variables of Quire, changes nothing here, or is refused with advice."""

import difflib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from svc_common.supervisor.vllm_values import OneOf, from_json

Variables = Mapping[str, str]
"""Values by name."""

GIVEN_KEYS = "--api-key"
"""What stands for a variable with the keys of `ApiKeys`."""

_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The arguments that are no flags, and the variables that the flags set, each with the flag that did."""

    positional: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)

    def set(self, flag: str, variables: Variables) -> None:
        """Adds the variables of one flag, in place of those that an earlier one has set."""
        self.variables.update(variables)
        self.flags.update(dict.fromkeys(variables, flag))


class FlagRefused(Exception):  # noqa: N818
    """A flag or value that is not served. The text names it, and what to use instead."""


@dataclass(frozen=True, slots=True)
class VllmFlag(ABC):
    """A flag of `vllm serve`, by its long name, with its short ones."""

    name: str
    aliases: tuple[str, ...] = field(default=(), kw_only=True)

    num_values = "one"
    """How many values follow it: "none", "one" or "many", which is at least one."""

    @property
    @abstractmethod
    def effect(self) -> str:
        """What it does here, for the manual."""

    @property
    def choices(self) -> Sequence[str]:
        """The values that it may have; empty where others are possible."""
        return ()

    @abstractmethod
    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        """The variables that it sets, with `is_off` in its form --no-NAME. Raises FlagRefused."""


@dataclass(frozen=True, slots=True)
class Value(VllmFlag):
    """A flag with a value that sets variables. `convert` raises ValueError with what the value must be."""

    variable: str
    note: str = ""
    convert: Callable[[str], str] = str

    @property
    def effect(self) -> str:
        return f"`{self.variable}`{self.note and f': {self.note}'}"

    @property
    def choices(self) -> Sequence[str]:
        return self.convert.choices if isinstance(self.convert, OneOf) else ()

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        try:
            return {self.variable: self.convert(values[0])}
        except ValueError as error:
            raise FlagRefused(f"{self.name} {values[0]}: {error}") from None


@dataclass(frozen=True, slots=True)
class Choice(VllmFlag):
    """A flag with one of these values. Each stands for a value of the variable; with None the flag has no effect."""

    variable: str
    values: Mapping[str, str | None]
    note: str = ""

    @property
    def effect(self) -> str:
        return f"`{self.variable}`: {self.note}"

    @property
    def choices(self) -> Sequence[str]:
        return tuple(self.values)

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        if values[0] not in self.values:
            raise FlagRefused(f"{self.name} {values[0]}: must be one of {', '.join(self.values)}")
        value = self.values[values[0]]
        return {} if value is None else {self.variable: value}


@dataclass(frozen=True, slots=True)
class Values(VllmFlag):
    """A flag with several values, which are joined by commas."""

    variable: str
    note: str = ""

    num_values = "many"

    @property
    def effect(self) -> str:
        return f"`{self.variable}`{self.note and f': {self.note}'}"

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        return {self.variable: ",".join(values)}


@dataclass(frozen=True, slots=True)
class ApiKeys(VllmFlag):
    """A flag with API keys, of which the caller writes a file. They are in `GIVEN_KEYS`, separated by line breaks."""

    num_values = "many"

    @property
    def effect(self) -> str:
        return (
            "`QUIRE_API_KEYS`: a file with the digests of these keys is written to `QUIRE_RUN_DIR`; they are keys of "
            "the tenant `default`"
        )

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        if not all(values):
            raise FlagRefused(f"{self.name}: a key must not be empty")
        return {GIVEN_KEYS: "\n".join(values)}


@dataclass(frozen=True, slots=True)
class JsonObject(Value):
    """A flag with a JSON object, which is the value of a variable."""

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        _json_object(self.name, values[0])
        return {self.variable: values[0]}


@dataclass(frozen=True, slots=True)
class JsonFields(VllmFlag):
    """A flag with a JSON object, whose keys set variables. Those in `fixed` have only these values, those in `ignored`
    any.
    """

    variables: Mapping[str, str]
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    constant: Variables = field(default_factory=dict)
    """Variables that it always sets."""
    ignored: Sequence[str] = ()

    @property
    def effect(self) -> str:
        keys = [f"`{key}` is `{variable}`" for key, variable in self.variables.items()]
        only = [f"`{key}` must be {' or '.join(map(json.dumps, values))}" for key, values in self.fixed.items()]
        verb = "has" if len(self.ignored) == 1 else "have"
        without = [f"{' and '.join(f'`{key}`' for key in self.ignored)} {verb} no effect"] if self.ignored else []
        return f"{'; '.join([*keys, *only, *without])}; other keys are refused"

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        read = dict(self.constant)
        for key, value in _json_object(self.name, values[0]).items():
            if key in self.ignored:
                continue
            if key in self.variables:
                if isinstance(value, bool) or not isinstance(value, str | int | float):
                    raise FlagRefused(f"{self.name}: {key} must be a text or a number, not {json.dumps(value)}")
                read[self.variables[key]] = str(value)
            elif key not in self.fixed:
                known = ", ".join([*self.variables, *self.fixed, *self.ignored])
                raise FlagRefused(f"{self.name}: the key {key} is not served; there is {known}")
            elif value not in self.fixed[key]:
                allowed = " or ".join(map(json.dumps, self.fixed[key]))
                raise FlagRefused(f"{self.name}: {key} must be {allowed}, not {json.dumps(value)}")
        return read


@dataclass(frozen=True, slots=True)
class FlagFile(VllmFlag):
    """A flag with a file of others. The caller puts them in its place."""

    note: str

    @property
    def effect(self) -> str:
        return self.note

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        raise FlagRefused(f"{self.name} is no flag of a file, nor an argument of a class")


@dataclass(frozen=True, slots=True)
class Switch(VllmFlag):
    """A flag without a value that sets a variable."""

    variable: str
    on: str
    off: str

    num_values = "none"

    @property
    def effect(self) -> str:
        return f"`{self.variable}={self.on}`"

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        return {self.variable: self.off if is_off else self.on}


@dataclass(frozen=True, slots=True)
class Only(VllmFlag):
    """A flag with values of which only some are served, and change nothing."""

    served: tuple[str, ...]
    why: str

    @property
    def effect(self) -> str:
        return f"must be {' or '.join(f'`{one}`' for one in self.served)}: {self.why}"

    @property
    def choices(self) -> Sequence[str]:
        return self.served

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        if values[0] not in self.served:
            raise FlagRefused(f"{self.name} must be {' or '.join(self.served)}, not {values[0]}: {self.why}")
        return {}


@dataclass(frozen=True, slots=True)
class Always(VllmFlag):
    """A flag without a value that asks for what Quire always does. Its form --no-NAME is refused."""

    why: str

    num_values = "none"

    @property
    def effect(self) -> str:
        return f"accepted: {self.why}"

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        if is_off:
            raise FlagRefused(f"--no-{self.name.removeprefix('--')} is not served: {self.why}")
        return {}


@dataclass(frozen=True, slots=True)
class NoEffect(VllmFlag):
    """A flag that changes nothing here, on or off, whatever its value."""

    why: str
    has_value: bool = False

    @property
    def num_values(self) -> str:  # type: ignore[override]
        return "one" if self.has_value else "none"

    @property
    def effect(self) -> str:
        return f"accepted, without effect: {self.why}"

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        return {}


@dataclass(frozen=True, slots=True)
class Refused(VllmFlag):
    """A flag that is not served, unless it asks for nothing: a switch as --no-NAME, another flag with false, 0, null or
    an empty value.
    """

    instead: str
    is_switch: bool = False

    @property
    def num_values(self) -> str:  # type: ignore[override]
        return "none" if self.is_switch else "one"

    @property
    def effect(self) -> str:
        return f"refused: {self.instead}"

    def read(self, values: Sequence[str], *, is_off: bool) -> Variables:
        if is_off or (values and not from_json(values[0], otherwise=values[0])):
            return {}
        raise FlagRefused(f"{self.name} is not served: {self.instead}")


def read_flags(
    arguments: Sequence[str],
    flags: Sequence[VllmFlag],
    others: Sequence[str] = (),
    before: CommandLine | None = None,
) -> CommandLine:
    """What a command line sets, beside or in place of what was set `before`. The last flag of a name counts.

    `others` are names of settings of this project, which have one value: --NAME sets QUIRE_NAME. Names may be written
    with underscores, values after "=". --NAME.KEY is one key of a flag with a JSON object; those of several flags are
    joined. Raises FlagRefused.
    """
    by_name: dict[str, VllmFlag] = {name: flag for flag in flags for name in (flag.name, *flag.aliases)}
    by_name |= {f"--{name}": Value(f"--{name}", _variable(name)) for name in others if f"--{name}" not in by_name}
    line = before or CommandLine()
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if not _is_flag(argument):
            line.positional.append(argument)
            continue
        flag, is_off, given = _find(argument, by_name)
        values = [] if given is None else [given]
        if flag.num_values == "none" and given is not None:
            raise FlagRefused(f"{flag.name} has no value")
        if flag.num_values != "none" and is_off:
            raise FlagRefused(f"{argument} is not a flag: {flag.name} has a value")
        while pending and not _is_flag(pending[0]) and _takes_more(flag, values, was_given=given is not None):
            values.append(pending.pop(0))
        if flag.num_values != "none" and not values and not isinstance(flag, Refused):
            raise FlagRefused(f"{flag.name} needs a value")
        if values and (key := argument.partition("=")[0].partition(".")[2]):
            value = from_json(values[0], otherwise=values[0])
            values = [json.dumps({**_keys_before(flag, line.variables), key.replace("-", "_"): value})]
        line.set(flag.name, flag.read(values, is_off=is_off))
    return line


def _keys_before(flag: VllmFlag, variables: Mapping[str, str]) -> Mapping[str, Any]:
    """What an earlier flag of the name has set of a variable that is the whole object."""
    if not isinstance(flag, JsonObject) or flag.variable not in variables:
        return {}
    return _json_object(flag.name, variables[flag.variable])


def _takes_more(flag: VllmFlag, values: list[str], *, was_given: bool) -> bool:
    if flag.num_values == "many":
        return not was_given
    return flag.num_values == "one" and not values


def _find(argument: str, by_name: Mapping[str, VllmFlag]) -> tuple[VllmFlag, bool, str | None]:
    """The flag of an argument, whether it is in its form --no-NAME, and its value after "="."""
    written, equals, value = argument.partition("=")
    name = written.replace("_", "-") if written.startswith("--") else written
    given = value if equals else None
    if name in by_name:
        return by_name[name], False, given
    if name.startswith("--no-") and (flag := by_name.get(f"--{name.removeprefix('--no-')}")) is not None:
        return flag, True, given
    if isinstance(flag := by_name.get(name.partition(".")[0]), JsonObject | JsonFields | Refused):
        return flag, False, given
    if not name.startswith("--") and (flag := by_name.get(written[:2])) is not None:  # -O3
        return flag, False, argument[2:]
    near = difflib.get_close_matches(name, by_name, 1)
    raise FlagRefused(f"{written} is not known{f': did you mean {near[0]}?' if near else ''}")


def _json_object(name: str, text: str) -> dict[str, Any]:
    """The value of a flag. Raises FlagRefused."""
    value = from_json(text)
    if not isinstance(value, dict):
        raise FlagRefused(f"{name}: must be a JSON object, not {text!r}")
    return value


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-" and not _NUMBER.fullmatch(argument)


def _variable(name: str) -> str:
    return f"QUIRE_{name.upper().replace('-', '_')}"
