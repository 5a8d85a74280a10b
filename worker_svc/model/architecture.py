"""The architectures that are described: one module of `architectures` each, or an entry point of `quire.models`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worker_svc.model import architectures
from worker_svc.model.config import UnsupportedModel
from worker_svc.model.description import InvalidDescription, ModelDescription
from worker_svc.model.plugins import Registry


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to describe the models of one `model_type` of config.json."""

    source: str
    """The file that says so: when it changes, descriptions that were kept are made anew."""
    class_name: str
    """The class of transformers that computes them: a config that names another one is not described."""
    describe: Callable[[Any], ModelDescription | None]
    """The description, given transformers' config; None where it is beyond what descriptions hold."""


_registry = Registry(
    architectures, "ARCHITECTURE", "quire.models", lambda value: isinstance(value, Architecture), "an Architecture"
)


def architecture_of(model_type: str) -> Architecture | None:
    """The architecture of this `model_type`, or None. Raises StartupFailed as `Registry.find` does."""
    found: Architecture | None = _registry.find(model_type)
    return found


def origin_of(model_type: str) -> str:
    """The packages that register an architecture, with their versions; empty where it is our own."""
    return _registry.origin(model_type)


def describe(config: Any) -> ModelDescription | None:
    """The description of a model, given transformers' config; None: only transformers' own modules compute it.

    Raises UnsupportedModel where the sizes of the config do not fit each other, and StartupFailed where the
    architecture fails.
    """
    architecture = architecture_of(config.model_type)
    if architecture is None or config.architectures not in (None, [architecture.class_name]):
        return None
    with _registry.running(config.model_type):
        try:
            return architecture.describe(config)
        except InvalidDescription as error:
            raise UnsupportedModel(
                f"the sizes of this {config.model_type} model do not fit each other: {error}"
            ) from error
