"""A worker of a small model in this process, with the settings of its flags."""

from collections.abc import Callable
from pathlib import Path

import torch

from svc_common.settings import read_settings
from worker_svc.instance import ModelInstance, load_instance
from worker_svc.settings import WorkerSettings


def load_worker(directory: Path, *args: str, report: Callable[[str], None] = print) -> ModelInstance:
    """The model of a directory, with a cache of 16 MiB at most."""
    small = ["--num-threads", str(torch.get_num_threads()), "--cpu-kv-bytes", str(2**24)]
    return load_instance(read_settings(WorkerSettings, ["--model", str(directory), *small, *args]), report)
