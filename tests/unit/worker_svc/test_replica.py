"""From settings to a warm replica: sizes, identity, and what cannot be served."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_models import VARIANTS
from svc_common.settings import read_settings
from worker_svc.errors import CannotServe
from worker_svc.fingerprint import model_fingerprint
from worker_svc.replica import Replica, load_replica
from worker_svc.settings import WorkerSettings


def _load(directory: Path, *args: str) -> Replica:
    threads = ["--num-threads", str(torch.get_num_threads())]
    return load_replica(read_settings(WorkerSettings, ["--model", str(directory), *threads, *args]), print)


def test_the_cache_takes_what_it_may_and_no_more(tiny_llama: Path) -> None:
    identity = _load(tiny_llama, "--cpu-kv-bytes", "1000000", "--dtype", "float32").identity
    assert identity.limits.num_blocks == 1000000 // identity.block_bytes


def test_no_room_for_a_block_is_said_at_start_up(tiny_llama: Path) -> None:
    with pytest.raises(CannotServe, match="no memory"):
        _load(tiny_llama, "--cpu-kv-bytes", "1000")


def test_the_number_of_blocks_can_be_given(tiny_llama: Path) -> None:
    assert _load(tiny_llama, "--num-blocks", "5").identity.limits.num_blocks == 5


@pytest.mark.parametrize("args", [("--num-blocks", "1"), ("--max-step-tokens", "1"), ("--max-sequences", "1")])
def test_the_smallest_budgets_start(args: tuple[str, str], tiny_llama: Path) -> None:
    _load(tiny_llama, *args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_at_start_up(tiny_llama: Path) -> None:
    with pytest.raises(CannotServe, match="no GPU"):
        _load(tiny_llama, "--device", "cuda")


def test_equal_models_have_equal_fingerprints(tiny_llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    assert model_fingerprint(copy, torch.float32) == model_fingerprint(tiny_llama, torch.float32)


def test_dtype_config_and_weights_change_the_fingerprint(
    tiny_llama: Path, tmp_path: Path, save_model: Callable[..., Path]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] += 1
    save_file(tensors, copy / "model.safetensors")
    fingerprints = {
        model_fingerprint(tiny_llama, torch.float32),
        model_fingerprint(tiny_llama, torch.bfloat16),
        model_fingerprint(copy, torch.float32),
        model_fingerprint(save_model(VARIANTS["mistral"]()), torch.float32),
    }
    assert len(fingerprints) == 4
