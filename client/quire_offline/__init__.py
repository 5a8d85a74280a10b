"""Models in the process of a program, without a server: `LLM` for lists of prompts, `AsyncLLM` for asyncio.

The parts are those of a server, so the answers are the same. Needs `pip install --editable '.[local]'` in a clone of
Quire.
"""

from quire_client.errors import QuireError
from quire_client.results import ToolCall
from quire_offline.async_llm import AsyncLLM
from quire_offline.errors import LoadError
from quire_offline.llm import LLM
from quire_offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire_offline.pooling_params import PoolingParams
from quire_offline.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoadError",
    "Logprob",
    "PoolingParams",
    "QuireError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "ToolCall",
]
