"""The architectures that are described: one module of `architectures` each, or an entry point of `quire.models`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from worker_svc.errors import UnsupportedModel
from worker_svc.model import architectures
from worker_svc.model.describe_directions import with_directions
from worker_svc.model.describe_score_head import with_score_head
from worker_svc.model.describe_text_model import of_text_model
from worker_svc.model.description import InvalidDescription, ModelDescription
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.plugins import Registry

AnyDescription: TypeAlias = ModelDescription | EncoderDescription


def is_decoder(description: AnyDescription | None) -> TypeGuard[ModelDescription]:
    """Whether a model is a decoder. An encoder may have a decoder's layers."""
    return isinstance(description, ModelDescription) and not description.is_encoder


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to describe the models of one `model_type` of config.json."""

    source: str
    """The file with the description; when it changes, cached descriptions are made again."""
    class_name: str
    """The class of transformers; a config that names another class is not described."""
    describe: Callable[[Any], AnyDescription | None]
    """The description, given transformers' config; None if a description cannot hold it."""
    other_class_names: tuple[str, ...] = ()
    """Further classes that `describe` supports. It reads which one it is from `architectures` of the config."""

    @classmethod
    def of_decoder(
        cls,
        source: str,
        name: str,
        describe: Callable[[Any], ModelDescription | None],
        generating_class: str | None = None,
        *,
        classifies: bool = True,
    ) -> "Architecture":
        """A decoder with the classes `name`ForCausalLM or `generating_class`, `name`Model, and if it `classifies`
        `name`ForSequenceClassification, whose head `describe_any` describes.
        """
        others = (f"{name}Model", *((f"{name}ForSequenceClassification",) if classifies else ()))
        return cls(source, generating_class or f"{name}ForCausalLM", describe, others)

    @classmethod
    def of_encoder(
        cls,
        source: str,
        name: str,
        describe: Callable[[Any], AnyDescription | None],
        *,
        has_pre_training: bool = False,
    ) -> "Architecture":
        """An encoder with the classes `name`Model, `name`ForSequenceClassification, which has a head, and
        `name`ForMaskedLM, whose prediction of hidden words is left out; with `has_pre_training` also
        `name`ForPreTraining, whose heads are left out.
        """
        endings = ("ForSequenceClassification", "ForMaskedLM", *(("ForPreTraining",) if has_pre_training else ()))
        return cls(source, f"{name}Model", describe, tuple(f"{name}{ending}" for ending in endings))

    @classmethod
    def of_text_model(
        cls,
        source: str,
        name: str,
        describe: Callable[[Any], AnyDescription | None] | None = None,
        *,
        has_soft_cap: bool = False,
    ) -> "Architecture":
        """The text model of a model that also takes images, with the classes `name`ForConditionalGeneration and
        `name`Model. `describe` is given the config of the text model; None: the architecture of its `model_type`
        describes it. `has_soft_cap`: whether the logits of the whole model have the soft cap of its text model's.
        """
        text_model = partial(_text_model, describe, has_soft_cap=has_soft_cap)
        return cls(source, f"{name}ForConditionalGeneration", text_model, (f"{name}Model",))

    def describes(self, config: Any) -> bool:
        """Whether a config names no class, or one of these."""
        names: list[str] | None = config.architectures
        return names is None or (len(names) == 1 and names[0] in (self.class_name, *self.other_class_names))


_registry = Registry(
    architectures, "ARCHITECTURE", "quire.models", lambda value: isinstance(value, Architecture), "an Architecture"
)


def architecture_of(model_type: str) -> Architecture | None:
    """The architecture of this `model_type`, or None. Raises StartupFailed as `Registry.find` does."""
    found: Architecture | None = _registry.find(model_type)
    return found


def architecture_names() -> list[str]:
    """Those that are described, sorted; Quire's own as their modules are called."""
    return _registry.names()


def origin_of(model_type: str) -> str:
    """The packages that register an architecture, with their versions; empty if it is Quire's own."""
    return _registry.origin(model_type)


def source_of(model_type: str) -> bytes:
    """The content of an architecture's `source`; empty if there is no such architecture.

    Raises StartupFailed if it cannot be read.
    """
    architecture = architecture_of(model_type)
    with _registry.running(model_type):
        return b"" if architecture is None else Path(architecture.source).read_bytes()


def identity_of(model_type: str) -> bytes:
    """Changes with the package that registers an architecture; empty if it is Quire's own. Raises as `source_of`."""
    identity = _registry.identity(model_type)
    return identity + source_of(model_type) if identity else b""


def _text_model(
    describe: Callable[[Any], AnyDescription | None] | None, config: Any, *, has_soft_cap: bool
) -> ModelDescription | None:
    """The description that `Architecture.of_text_model` makes of a config."""
    text = copy(config.get_text_config())
    # Not every text model's config has this field. transformers reads that of the whole model.
    text.tie_word_embeddings = config.tie_word_embeddings
    if describe is None:
        architecture = architecture_of(text.model_type)
        if architecture is None:
            return None
        describe = architecture.describe
    with _describing(text.model_type):
        decoder = describe(text)
        if not is_decoder(decoder):
            return None
        return of_text_model(with_directions(decoder, text), config.model_type, has_soft_cap=has_soft_cap)


@contextmanager
def _describing(model_type: str) -> Iterator[None]:
    """Runs code of an architecture. Raises as `describe_any` does."""
    with _registry.running(model_type):
        try:
            yield
        except InvalidDescription as error:
            raise UnsupportedModel(f"the sizes of this {model_type} model do not fit each other: {error}") from error


def describe(config: Any) -> ModelDescription | None:
    """The description of a decoder, given transformers' config; None: only transformers' own modules compute it, or it
    is an encoder. Raises as `describe_any` does.
    """
    description = describe_any(config)
    return description if isinstance(description, ModelDescription) else None


def describe_any(config: Any) -> AnyDescription | None:
    """The description of a decoder or an encoder, given transformers' config; None: only transformers' own modules
    compute the model.

    Raises UnsupportedModel if the sizes of the config contradict each other, or its head is not supported, and
    StartupFailed if the architecture fails.
    """
    architecture = architecture_of(config.model_type)
    if architecture is None or not architecture.describes(config):
        return None
    with _describing(config.model_type):
        description = architecture.describe(config)
        if not isinstance(description, ModelDescription):
            return description
        return with_score_head(with_directions(description, config), config)
