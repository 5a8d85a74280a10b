"""Parameters of a call as values, by the names of fields of the HTTP API."""

from collections.abc import Mapping, Sequence, Set, Sized
from numbers import Integral, Real
from typing import Any, ClassVar, Self, TypeVar

from quire_client.requests import no_option

P = TypeVar("P", bound="Parameters")


class Parameters:
    """Parameters that were given, or assigned. Values are checked when they are used. Raises TypeError for a name that
    does not exist.
    """

    __slots__ = ("_values",)

    names: ClassVar[Set[str]] = frozenset()
    """The parameters that there are."""
    not_served: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Names of other APIs, with the values beside None that ask for nothing: others are refused."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Names of other APIs, with the parameter to use in their place."""

    _values: dict[str, Any]

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            raise TypeError(f"{type(self).__name__} takes its parameters by their names only")
        self._values = {}
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def values(self) -> Mapping[str, Any]:
        """Those that were given, as a body has them."""
        return self._values

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            return self._values.get(name)
        raise AttributeError(f"{type(self).__name__} has no parameter {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_values":  # at the beginning, and by copy and pickle
            super().__setattr__(name, value)
        elif name in self.names:
            if value is None:
                self._values.pop(name, None)
            else:
                self._values[name] = plain(value)
        elif name in self.instead:
            raise TypeError(f"{name} is not served: use {self.instead[name]}")
        elif name not in self.not_served:
            raise no_option(name, sorted(self.names))
        elif value not in (None, *self.not_served[name]):
            only = " or ".join(map(repr, self.not_served[name]))
            raise TypeError(f"{name} is not served: leave it out{only and f', or give {only}'}")

    def clone(self) -> Self:
        """A copy, which may be changed."""
        return type(self)(**self._values)

    __copy__ = clone

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]  # values may be lists

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def params_of(given: P | Sequence[P] | None, default: P, num_prompts: int, name: str) -> list[P]:
    """The parameters of each prompt of a call: the same for all, or one each. `name` is that of the argument.

    Raises TypeError for what is none, ValueError where their number is not that of the prompts.
    """
    kind = type(default)
    if given is None:
        given = default
    if isinstance(given, kind):
        return [given] * num_prompts
    require_list(given, name, f"{kind.__name__} or a list of them")
    if len(given) != num_prompts:
        raise ValueError(f"there are {len(given)} {name} for {num_prompts} prompts")
    for index, one in enumerate(given):
        if not isinstance(one, kind):
            raise TypeError(f"{name}[{index}]: must be {kind.__name__}, not {type(one).__name__}")
    return list(given)


def require_list(given: object, name: str, must_be: str) -> None:
    """Raises TypeError for what has no items, or has other ones than a list: texts and bytes, mappings and sets."""
    is_list = isinstance(given, Sized) and hasattr(given, "__getitem__")
    if not is_list or isinstance(given, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError(f"{name}: must be {must_be}, not {type(given).__name__}")


def plain(value: Any) -> Any:
    """A value as JSON has it: tuples are lists, names of objects are text, and numbers those of Python."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value
