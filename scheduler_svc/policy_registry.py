"""Finds a scheduling policy by name: the built-in ones, then entry points of installed packages."""

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from scheduler_svc.core.policy import POLICIES, Policy, PolicySettings

GROUP = "quire.policies"
"""The group of entry points; each one names a class that takes PolicySettings and is a Policy."""


class UnknownPolicy(ValueError):  # noqa: N818
    """No policy has this name, or it cannot be used. The text is for the operator."""


def find_policy(name: str) -> Callable[[PolicySettings], Policy]:
    """The class of a policy. A built-in one comes before any entry point of its name.

    Raises UnknownPolicy.
    """
    if name in POLICIES:
        return POLICIES[name]
    installed = entry_points(group=GROUP)
    named = [point for point in installed if point.name == name]
    if not named:
        known = ", ".join([*sorted(POLICIES), *sorted(installed.names - POLICIES.keys())])
        raise UnknownPolicy(f"there is no policy {name!r}; known: {known}")
    targets = sorted({point.value for point in named})
    if len(targets) > 1:
        raise UnknownPolicy(f"several packages have a policy {name!r}: {', '.join(targets)}")
    return _load(named[0])


def _load(point: EntryPoint) -> Callable[[PolicySettings], Policy]:
    where = f"the policy {point.name!r}, entry point {point.value} of {GROUP},"
    try:
        loaded: Any = point.load()
    except Exception as error:  # the package's own code runs here
        raise UnknownPolicy(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, type):
        raise UnknownPolicy(f"{where} is not a class")
    if not _accepts(loaded, 1):
        raise UnknownPolicy(f"{where} does not take PolicySettings as its one argument")
    missing = [method for method in _METHODS if not callable(getattr(loaded, method, None))]
    if missing:
        raise UnknownPolicy(f"{where} is not a policy: it has no {', no '.join(missing)}")
    for method, parameters in _METHODS.items():
        if not _accepts(getattr(loaded, method), len(parameters)):
            raise UnknownPolicy(f"{where} is not a policy: {method} does not take ({', '.join(parameters)})")
    try:
        loaded(PolicySettings())  # as each leader does, which would have to resign
    except Exception as error:
        raise UnknownPolicy(f"{where} cannot be made: {type(error).__name__}: {error}") from error
    return loaded


def _accepts(function: Callable[..., object], num_arguments: int) -> bool:
    """Whether it can be called with this many positional arguments, by its signature."""
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except (TypeError, ValueError):  # ValueError: it is written in C and has no signature
        return False
    return True


# The methods that the core calls, with their parameters.
_METHODS = {
    name: tuple(inspect.signature(member).parameters)
    for name, member in vars(Policy).items()
    if inspect.isfunction(member) and (name == "__len__" or not name.startswith("_"))
}
