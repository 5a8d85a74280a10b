"""What sentence-transformers writes of a generating model that answers whether a document fits a query."""

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}Task: {{ message.content }}\n"
    "{% elif message.role == 'query' %}<|im_start|>Query: {{ message.content }}\n"
    "{% elif message.role == 'document' %}Document: {{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{{ tail }}{% endif %}"
)
"""With the special tokens of the tiny tokenizer."""


def write_reranker_files(
    directory: Path,
    true_token: int | None,
    false_token: int | None,
    *,
    template: str = TEMPLATE,
    prompts: dict[str, Any] | None = None,
    has_parts: bool = False,
    variables: dict[str, Any] | None = None,
) -> None:
    """Writes them beside a model's. `prompts` are further fields of config_sentence_transformers.json, `variables`
    those of the template.
    """
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    message = {"method": "forward", "format": "structured" if has_parts else "flat"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"message": message},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True, **(variables or {})}},
    }
    (directory / "1_LogitScore").mkdir(exist_ok=True)
    for name, value in (
        ("modules.json", modules),
        ("1_LogitScore/config.json", {"true_token_id": true_token, "false_token_id": false_token}),
        ("sentence_bert_config.json", transformer),
        ("config_sentence_transformers.json", prompts or {}),
    ):
        (directory / name).write_text(json.dumps(value))
    (directory / "chat_template.jinja").write_text(template)
