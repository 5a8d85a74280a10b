"""The models of this gateway by name and alias. The session knows which of them are ready."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway_svc.field_paths import Field, FieldPath
from gateway_svc.generation_config import load_generation_defaults
from gateway_svc.grammar_checker import GrammarChecker
from gateway_svc.message_formats.description import MessageFormat
from gateway_svc.message_formats.formats import choose_format
from gateway_svc.pair_chats import pair_form
from gateway_svc.sampling_fields import DEFAULT_MAX_LOGPROBS
from gateway_svc.settings import BadSetting, check_formats
from gateway_svc.tenant import DEFAULT_TENANT, Tenant
from gateway_svc.text_pairs import PairForm
from gateway_svc.tokenizer import InvalidModelFiles, ModelTokenizer
from gateway_svc.tool_forms import ToolForms
from gateway_svc.unvalidated_request import GenerationDefaults
from gateway_svc.validation import Validator
from svc_common.errors import QuireError, Reason
from svc_common.model_settings import ModelSettings
from svc_common.model_tasks import ModelTask, labels_of, task_of
from svc_common.models import ModelNotFound, tokenizer_fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class CatalogModel:
    """A model's tokenizer, defaults, validator and grammars. Workers and schedulers have only its `name`."""

    name: str
    aliases: tuple[str, ...]
    tokenizer_fingerprint: bytes
    tokenizer: ModelTokenizer
    defaults: GenerationDefaults
    validator: Validator
    grammars: GrammarChecker | None = None
    message_format: MessageFormat = MessageFormat()  # noqa: RUF009
    task: ModelTask = ModelTask.GENERATE
    """What its workers compute, by its files."""
    pairs: PairForm | None = None
    """How it takes pairs of texts, if its workers compute their scores."""
    labels: tuple[str, ...] = ()
    """The names of the labels of its head, if it has one."""

    @classmethod
    def load(
        cls, settings: ModelSettings, max_logprobs: int = DEFAULT_MAX_LOGPROBS, seed: int | None = None
    ) -> "CatalogModel":
        """Reads the model's files. Raises ModelNotFound, InvalidModelFiles and BadSetting."""
        served = settings.resolve()
        try:
            defaults = load_generation_defaults(
                settings.generation_config, settings.override_generation_config, served.path
            )
            template, variables = settings.chat_template or None, settings.chat_template_kwargs
            tokenizer = ModelTokenizer.load(served.path, served.other_tokenizer, template, variables)
            message_format = _message_format(settings, tokenizer)
            task = task_of(served.path, settings.task)
            pairs = pair_form(tokenizer, served.path) if task is ModelTask.SCORE else None
            labels = labels_of(served.path) if task in (ModelTask.SCORE, ModelTask.CLASSIFY) else ()
            if task is not ModelTask.GENERATE and not (pairs is not None and pairs.of_chat):
                tokenizer.check_end_of_text()
        except (BadSetting, InvalidModelFiles, ModelNotFound) as error:
            raise type(error)(settings.locate(error)) from error
        fingerprint = tokenizer_fingerprint(served.tokenizer_path)
        grammars = GrammarChecker(served.tokenizer_path / "tokenizer.json", tokenizer.eos_token_ids)
        validator = Validator(tokenizer, defaults, settings.chat_roles, grammars, message_format, max_logprobs, seed)
        names = (served.name, served.aliases)
        return cls(*names, fingerprint, tokenizer, defaults, validator, grammars, message_format, task, pairs, labels)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, then its aliases."""
        return (self.name, *self.aliases)

    @property
    def given_defaults(self) -> dict[str, float]:
        """The operator's defaults."""
        max_tokens = self.defaults.max_tokens
        return {**self.defaults.sampling, **({} if max_tokens is None else {"max_tokens": max_tokens})}


def _message_format(settings: ModelSettings, tokenizer: ModelTokenizer) -> MessageFormat:
    """Raises BadSetting for a format that is not known."""
    check_formats(settings)
    template = tokenizer.chat_template
    if template is None:
        return choose_format(settings.tool_format, settings.reasoning_format, "")
    return choose_format(
        settings.tool_format,
        settings.reasoning_format,
        template.constants,
        tool_template=template.for_chat(has_tools=True).constants,
        template_takes_tools=ToolForms.of(template).takes_tools,
    )


class ModelCatalog:
    """All models of this gateway. The first one is the default."""

    def __init__(self, models: Sequence[CatalogModel]) -> None:
        """Takes at least one model. Names and aliases are unique."""
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.names}

    @classmethod
    def load(
        cls, settings: Sequence[ModelSettings], max_logprobs: int = DEFAULT_MAX_LOGPROBS, seed: int | None = None
    ) -> "ModelCatalog":
        """Reads the files of all models. Raises ModelNotFound, InvalidModelFiles and BadSetting.

        `max_logprobs` bounds how many top tokens are reported with each token. Of `seed` those of requests without one
        are drawn; None: they are random.
        """
        return cls([CatalogModel.load(each, max_logprobs, seed) for each in settings])

    def __iter__(self) -> Iterator[CatalogModel]:
        return iter(self._models)

    @property
    def fingerprints(self) -> Mapping[str, bytes]:
        """The fingerprint of each model's tokenizer, by the model's name."""
        return {model.name: model.tokenizer_fingerprint for model in self._models}

    def get(self, name: str) -> CatalogModel | None:
        return self._by_name.get(name)

    def is_open_to(self, tenant: Tenant, name: str) -> bool:
        """Whether a tenant's key may use the model of a request that exists; this gateway may not have it."""
        model = self._by_name.get(name)
        return tenant.may_use((name,) if model is None else model.names)

    def find(self, name: str | None, field_path: FieldPath, tenant: Tenant = DEFAULT_TENANT) -> CatalogModel:
        """The model that a client names; None: the first one that its key may use. Raises QuireError MODEL_NOT_FOUND.

        A model that the key may not use is answered as one that does not exist.
        """
        usable = [model for model in self._models if tenant.may_use(model.names)]
        if name is None and usable:
            return usable[0]
        model = self._by_name.get(name or "")
        if model is None or model not in usable:
            served = ", ".join(model.name for model in usable) or "none"
            message = f"no such model is served; there is {served}"
            raise QuireError(Reason.MODEL_NOT_FOUND, message, field=field_path(Field.MODEL))
        return model

    def close(self) -> None:
        for model in self._models:
            model.tokenizer.close()
            if model.grammars is not None:
                model.grammars.close()
