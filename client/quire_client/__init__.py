"""Python client of Quire: `AsyncClient` for asyncio, `Client` for everything else."""

from quire_client.aio import AsyncClient, AsyncStream
from quire_client.chats import AllowedTools, CustomTool, Message, Tool
from quire_client.classify_requests import ClassifyOptions
from quire_client.connection import __version__
from quire_client.embed_requests import EmbedOptions
from quire_client.errors import QuireError
from quire_client.requests import GenerationOptions
from quire_client.results import (
    Acceptance,
    Chunk,
    Classifications,
    Completion,
    Embeddings,
    Finish,
    FinishReason,
    Generation,
    Model,
    ReturnedPrompt,
    Scores,
    Tokenized,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from quire_client.score_requests import ScoreOptions
from quire_client.sync import Client, Stream

__all__ = [
    "Acceptance",
    "AllowedTools",
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Classifications",
    "ClassifyOptions",
    "Client",
    "Completion",
    "CustomTool",
    "EmbedOptions",
    "Embeddings",
    "Finish",
    "FinishReason",
    "Generation",
    "GenerationOptions",
    "Message",
    "Model",
    "QuireError",
    "ReturnedPrompt",
    "ScoreOptions",
    "Scores",
    "Stream",
    "TokenLogprob",
    "Tokenized",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "__version__",
]
