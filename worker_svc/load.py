"""Loads the model of the settings: a decoder, or a model that computes values of prompts."""

from collections.abc import Callable

from worker_svc.encoder.instance import load_encoder
from worker_svc.instance import load_instance
from worker_svc.model.description_cache import any_description_of
from worker_svc.model.value_models import for_task
from worker_svc.settings import WorkerSettings
from worker_svc.step_runner import StepInstance


def load_model(settings: WorkerSettings, report: Callable[[str], None]) -> StepInstance:
    """The model, loaded and warm. `report` receives progress lines, on another thread.

    Raises ModelNotFound, or StartupFailed and its subclasses, with a text for the operator.
    """
    directory = settings.served_model().path
    description, has_values = for_task(any_description_of(directory), directory, settings.task)
    if has_values:
        assert description is not None, "models without a description compute tokens only"
        return load_encoder(settings, description, report)
    return load_instance(settings, report)
