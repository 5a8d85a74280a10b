"""The default model with six of its thirty layers: its files, name and vocabulary. A step takes a third of the time.

What it writes makes no sense, but its tokens differ from step to step, and transformers computes the same. Tests of
what a deployment does with requests use it; those that judge the real model's tokens do not.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.deployment import prepare_model
from kept_files import kept
from svc_common.models import DEFAULT_MODEL, cache_root, resolve_model

LAYERS = (0, 1, 2, 3, 28, 29)
"""The layers that are kept: with the last ones, tokens do not repeat."""
SCALE = 0.25
"""Of the logits: without the other layers, one token would have almost all of the probability."""

_PREFIX = "model.layers."


@contextmanager
def shallow_default_model() -> Iterator[Path]:
    """Makes it the default model of this process, and of those that it starts with its QUIRE_CACHE_DIR. Yields its
    directory.

    The compiled kernels are those of the user's cache.
    """
    whole, kernels = prepare_model().path, (cache_root() / "kernels").resolve()
    weights = (whole / "model.safetensors").stat()
    kernels.mkdir(parents=True, exist_ok=True)

    def make(cache: Path) -> None:
        _make(whole, cache / "models" / DEFAULT_MODEL)
        (cache / "kernels").symlink_to(kernels)

    cache = kept("shallow", __file__, (weights.st_size, weights.st_mtime_ns, kernels), make)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(cache))
        yield resolve_model(None).path


def _make(whole: Path, directory: Path) -> None:
    """Writes the model into a new directory."""
    shutil.copytree(whole, directory, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((whole / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(LAYERS)}))
    kept = {}
    with safe_open(whole / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  it is no mapping
            if not name.startswith(_PREFIX):
                kept[name] = tensors.get_tensor(name)
                continue
            layer, _, rest = name.removeprefix(_PREFIX).partition(".")
            if int(layer) in LAYERS:
                kept[f"{_PREFIX}{LAYERS.index(int(layer))}.{rest}"] = tensors.get_tensor(name)
    kept["model.norm.weight"] *= SCALE
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
