"""How a model's embeddings are made, by the files that sentence-transformers writes."""

from pathlib import Path
from typing import Any

from svc_common.models import module_kind, read_json, read_modules
from worker_svc.encoder.pooling import DenseSpec, EmbeddingDefaults
from worker_svc.errors import UnsupportedModel
from worker_svc.model.embedding_layers import dense_spec
from worker_svc.model.sentence_files import module_config
from worker_svc.step import Pooling

# By their names in the pooling's config: switches of their own, or values of `pooling_mode`.
_MODES = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "lasttoken": Pooling.LAST,
}


def embedding_defaults(directory: Path, *, is_decoder: bool = False) -> EmbeddingDefaults:
    """What the files of sentence-transformers say. Without them an encoder's is the mean, not normalised, as its
    library does, and a decoder's the last token's state, normalised, as vLLM does.

    Raises UnsupportedModel where they name what is not computed here, and DamagedModelFile as `read_json` does.
    """
    modules = read_modules(directory)
    pooling, normalizes = Pooling.MEAN, False
    layers: list[DenseSpec] = []
    before: list[str] = []
    if is_decoder and not modules:
        pooling, normalizes = Pooling.LAST, True
    for module in modules:
        kind = module_kind(module)
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(module_config(directory, module), directory)
            case "Dense" if "Pooling" in before and "Normalize" not in before:
                layers.append(dense_spec(directory, module))
            case "Normalize":
                normalizes = True
            case _:
                place = f" behind {before[-1]}" if kind == "Dense" and before else ""
                raise UnsupportedModel(
                    f"the model in {directory} has a module {kind}{place} in modules.json: not supported"
                )
        before.append(kind)
    config: dict[str, Any] = read_json(directory / "sentence_bert_config.json", {})
    limit = config.get("max_seq_length")
    max_tokens = limit if isinstance(limit, int) and limit > 0 else None
    return EmbeddingDefaults(pooling, normalizes, max_tokens, tuple(layers))


def _pooling(config: dict[str, Any], directory: Path) -> Pooling:
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [name for name in config if config[name] is True]
    # Other switches are about prompts with instructions.
    modes = [mode for mode in modes if mode in _MODES or mode.startswith("pooling_mode")]
    if len(modes) != 1 or modes[0] not in _MODES:
        named = ", ".join(modes) or "none"
        raise UnsupportedModel(
            f"the model in {directory} pools by {named}; only one of mean, cls and last is supported"
        )
    return _MODES[modes[0]]
