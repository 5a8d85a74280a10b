"""Parameters of embeddings, classifications and scores by vLLM's names, which are the fields of the HTTP API."""

from typing import ClassVar

from gateway_svc.http_api.embeddings.models import EmbeddingsBody
from gateway_svc.http_api.scoring.models import SimilarityBody
from quire_offline.parameters import Parameters

# Of a body, and not of how its values are made.
_OF_REQUESTS = {"encoding_format", "input", "model", "priority", "retention"}


class PoolingParams(Parameters):
    """How values are made, as in the bodies of /v1/embeddings, /classify and /score: docs/api.md has each field with
    its range and default.

    All have `truncate_prompt_tokens`, `truncation_side` and `use_activation`; embeddings also `dimensions`, `pooling`,
    `normalize` and `add_special_tokens`, classifications `add_special_tokens` and `raw_scores`, scores
    `max_tokens_per_query`, `max_tokens_per_doc` and `raw_scores`. Those of other calls are refused.
    """

    __slots__ = ()

    names: ClassVar = (EmbeddingsBody.served_fields() | SimilarityBody.served_fields()) - _OF_REQUESTS
