"""A runner as an instance of a model: what a worker's service has."""

import torch

from worker_svc.description import WorkerDescription
from worker_svc.instance import ModelInstance
from worker_svc.memory_parts import MemoryAccount
from worker_svc.runner import Runner


def make_instance(runner: Runner) -> ModelInstance:
    """A runner with a description. Only the limits in it are real; the other fields are placeholders."""
    description = WorkerDescription("tiny", b"model", b"tokenizer", 1, runner.limits, "float32", "cpu")
    return ModelInstance(description, runner, MemoryAccount(torch.device("cpu")))
