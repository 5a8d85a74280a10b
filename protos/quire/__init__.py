"""The contracts of Quire's services, and the classes of a model in this process: `from quire import LLM`.

The classes are imported when they are first used: programs that only need the contracts import neither torch nor the
services.
"""

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_offline import (
        LLM,
        AsyncLLM,
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingParams,
        RequestOutput,
        SamplingParams,
        ScoringRequestOutput,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationRequestOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
]

# A package with this file would hide contracts in other folders of the path, such as those that a program has generated
# for itself, or those of a second distribution. As without the file, all of them are found.
__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import quire_offline
    except ModuleNotFoundError as error:
        raise ImportError(
            f"quire.{name} needs the parts of a server, and there is no module {error.name}. "
            "In a clone of Quire: pip install --editable '.[local]'"
        ) from error
    return getattr(quire_offline, name)
