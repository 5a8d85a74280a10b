"""Tables of the file of API keys: checked values, and what a key or a token allows."""

import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from gateway_svc.retention import Retention
from gateway_svc.tenant import AccountLimits, Tenant, account_name

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST = 2**31 - 1
_MOST_PER_MINUTE = 2**53

_LIMITS = {
    "max_running": (1, _MOST),
    "max_queued": (1, _MOST),
    "max_kv_blocks": (1, _MOST),
    "tokens_per_minute": (1, _MOST_PER_MINUTE),
    "requests_per_minute": (1, _MOST_PER_MINUTE),
}
"""The limits that are integers, with their ranges."""

_FACTOR = "cached_token_factor"
LIMIT_FIELDS = (*_LIMITS, _FACTOR)
"""What an account may use: the same for all its keys."""

ALLOWANCE_FIELDS = frozenset({"weight", "max_priority", "models", "retention", *LIMIT_FIELDS})
"""What a key or a token allows."""


class InvalidKeyFile(Exception):  # noqa: N818
    """A file of keys that cannot be used. The text is for the operator and holds no key."""


class Table:
    """A table of the file. Errors name the field, never its value."""

    def __init__(self, where: str, values: Any, fields: Collection[str]) -> None:
        """`where` is the file and the place in it. Raises InvalidKeyFile for fields other than `fields`."""
        if not isinstance(values, dict):
            raise InvalidKeyFile(f"{where} is not a table")
        if unknown := sorted(set(values) - set(fields)):
            raise InvalidKeyFile(f"{where} has the unknown field {unknown[0]}")
        self.where = where
        self.values: Mapping[str, Any] = values

    def invalid(self, field: str, message: str) -> InvalidKeyFile:
        return InvalidKeyFile(f"{self.where}.{field} {message}")

    def integer(self, field: str, least: int, most: int) -> int | None:
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.invalid(field, f"is not an integer from {least} to {most}")
        return value

    def number(self, field: str) -> float | None:
        """A finite number, or None where there is none."""
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise self.invalid(field, "is not a finite number")
        return float(value)

    def text(self, field: str) -> str:
        """A string that is not empty."""
        value = self.values.get(field)
        if not isinstance(value, str) or not value:
            raise self.invalid(field, "is not a non-empty string" if value is not None else "is missing")
        return value

    def name(self, field: str) -> str | None:
        """A short name, or None where there is none."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, str) or not is_name(value):
            raise self.invalid(field, "is not 1 to 64 letters, digits, '.', '_' or '-'")
        return value


def is_name(value: str) -> bool:
    """Whether the name of a key or a profile is valid. It has no "/" and no ":"."""
    return _NAME.fullmatch(value) is not None


def read_allowance(table: Table, tenant: str, key_name: str) -> Tenant:
    """A tenant, and what the fields of a table allow to its account of this name."""
    weight = table.number("weight")
    if weight is not None and not weight > 0:
        raise table.invalid("weight", "is not above 0")
    max_priority = table.integer("max_priority", -(2**31), _MOST)
    return Tenant(
        tenant,
        1.0 if weight is None else weight,
        _limits(table, account_name(tenant, key_name)),
        0 if max_priority is None else max_priority,
        _models(table),
        _retention(table),
    )


def _limits(table: Table, account: str) -> AccountLimits:
    factor = table.number(_FACTOR)
    if factor is not None and not 0 <= factor <= 1:
        raise table.invalid(_FACTOR, "is not from 0 to 1")
    limits = {field: table.integer(field, *bounds) for field, bounds in _LIMITS.items()}
    return AccountLimits(account, **limits, cached_token_factor=factor)


def _models(table: Table) -> frozenset[str] | None:
    models = table.values.get("models")
    if models is None:
        return None
    if not isinstance(models, list) or not models or not all(isinstance(each, str) and each for each in models):
        raise table.invalid("models", "is not a list of one or more names")
    return frozenset(models)


def _retention(table: Table) -> Retention | None:
    match table.values.get("retention"):
        case None:
            return None
        case "none" | "until_end" as word:
            return Retention.parse(word)
        case int() as seconds if 1 <= seconds <= _MOST and not isinstance(seconds, bool):
            return Retention(is_recorded=True, seconds=seconds)
    raise table.invalid("retention", f'is not "none", "until_end" or an integer of seconds from 1 to {_MOST}')
