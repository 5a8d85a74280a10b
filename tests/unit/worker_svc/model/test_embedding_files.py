"""How a model's embeddings are made, by the files of sentence-transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_models import save_bert
from worker_svc.encoder.pooling import EmbeddingDefaults
from worker_svc.errors import UnsupportedModel
from worker_svc.model.embedding_files import embedding_defaults
from worker_svc.step import Pooling


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_the_files_of_sentence_transformers(pooling: str, tmp_path: Path) -> None:
    save_bert(tmp_path, pooling=pooling, normalizes=pooling != "cls", max_tokens=32)
    assert embedding_defaults(tmp_path) == EmbeddingDefaults(Pooling(pooling), pooling != "cls", 32)


def test_a_model_without_them_has_the_mean(tmp_path: Path) -> None:
    assert embedding_defaults(tmp_path) == EmbeddingDefaults(Pooling.MEAN, normalizes=False, max_tokens=None)


@pytest.mark.parametrize(
    ("modules", "config", "text"),
    [
        ([{"type": "sentence_transformers.models.Dense"}], {}, "a module Dense"),
        ([{"type": "x.Normalize"}, {"type": "x.Dense"}], {}, "a module Dense behind Normalize"),
        ([{"type": "sentence_transformers.models.LSTM"}], {}, "a module LSTM"),
        ([{"type": "x.Pooling", "path": "p"}], {"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        ([{"type": "x.Pooling", "path": "p"}], {}, "pools by none"),
        ([{"type": "x.Pooling", "path": "../p"}], {}, "outside of the model"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    modules: Any, config: dict[str, Any], text: str, tmp_path: Path
) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=text):
        embedding_defaults(tmp_path)


def test_the_newer_form_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": ""}]')
    (tmp_path / "config.json").write_text('{"pooling_mode": "lasttoken", "include_prompt": true}')
    assert embedding_defaults(tmp_path).pooling is Pooling.LAST
