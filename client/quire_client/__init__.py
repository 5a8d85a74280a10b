"""Python client of Quire: `AsyncClient` for asyncio, `Client` for everything else.

The names are imported when they are first used, so that `quire` can handle Ctrl-C before grpc is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        Completion,
        Finish,
        FinishReason,
        Generation,
        Model,
        ReturnedPrompt,
        Tokenized,
        TokenLogprob,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from quire_client.score_requests import ScoreOptions
    from quire_client.sync import Client, Stream
    from quire_client.value_results import Classifications, Embeddings, Scores

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

_MODULE_OF = {
    "Acceptance": "results",
    "AllowedTools": "chats",
    "AsyncClient": "aio",
    "AsyncStream": "aio",
    "Chunk": "results",
    "Classifications": "value_results",
    "ClassifyOptions": "classify_requests",
    "Client": "sync",
    "Completion": "results",
    "CustomTool": "chats",
    "EmbedOptions": "embed_requests",
    "Embeddings": "value_results",
    "Finish": "results",
    "FinishReason": "results",
    "Generation": "results",
    "GenerationOptions": "requests",
    "Message": "chats",
    "Model": "results",
    "QuireError": "errors",
    "ReturnedPrompt": "results",
    "ScoreOptions": "score_requests",
    "Scores": "value_results",
    "Stream": "sync",
    "TokenLogprob": "results",
    "Tokenized": "results",
    "Tool": "chats",
    "ToolCall": "results",
    "ToolCallDelta": "results",
    "Usage": "results",
    "__version__": "connection",
}


if not TYPE_CHECKING:  # else a type checker would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF.values():
            return import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
