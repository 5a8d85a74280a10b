"""The requests of a call, from its arguments: what the blocking and the asynchronous class share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

from gateway_svc.unvalidated_request import GenerationDefaults
from quire_offline.errors import client_errors, noting_prompt
from quire_offline.offline_request import Messages, OfflineRequest, Prompt, chats_of, prompts_of
from quire_offline.offline_values import OfflineClassification, OfflineEmbedding, OfflineScores, TextPairs, Texts
from quire_offline.parameters import params_of, plain, require_list
from quire_offline.pooling_params import PoolingParams
from quire_offline.sampling_params import SamplingParams

P = TypeVar("P")
R = TypeVar("R")

_OF_SERVERS = ("model", "retention", "stream", "stream_options")
"""Fields of a chat's body that ask for what a call here cannot do."""


def read_prompts(
    ids: Iterator[str],
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    priority: int | Sequence[int] | None = None,
) -> list[OfflineRequest]:
    """Prompts to continue. Raises QuireError, TypeError, and ValueError for lists of other lengths."""
    given = prompts_of(prompts)
    params = params_of(sampling_params, SamplingParams(), len(given), "sampling_params")
    return _read_prompts(ids, OfflineRequest.of_prompt, given, params, priority)


def read_chats(
    ids: Iterator[str],
    messages: Messages | Sequence[Messages],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    options: Mapping[str, Any],
    priority: int | Sequence[int] | None = None,
) -> list[OfflineRequest]:
    """Chats to answer; `options` are fields of a chat's body. Raises QuireError, TypeError and ValueError."""
    given = chats_of(messages)
    params = params_of(sampling_params, SamplingParams(), len(given), "sampling_params")
    readers = [
        partial(OfflineRequest.of_chat, messages=chat, params=one, options={**options, "priority": number})
        for chat, one, number in zip(given, params, _priorities(priority, len(given)), strict=True)
    ]
    return _read(ids, readers)


def chat_options(
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """Fields of a chat's body, from arguments of a call. Raises TypeError."""
    if tools is not None:
        require_list(tools, "tools", "a list of tools")
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise TypeError(f"chat_template_kwargs: must be an object, not {type(chat_template_kwargs).__name__}")
    for name in _OF_SERVERS:
        if others.get(name):
            raise TypeError(f"{name}: is not an argument, but a field of a server's body")
    return {
        **{name: plain(value) for name, value in others.items()},
        "tools": None if tools is None else list(tools),
        "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
    }


def read_embeddings(
    ids: Iterator[str],
    prompts: Prompt | Sequence[Prompt],
    pooling_params: PoolingParams | Sequence[PoolingParams] | None,
    priority: int | Sequence[int] | None = None,
) -> list[OfflineEmbedding]:
    """Prompts to embed. Raises QuireError, TypeError and ValueError."""
    given = prompts_of(prompts)
    params = params_of(pooling_params, PoolingParams(), len(given), "pooling_params")
    return _read_prompts(ids, OfflineEmbedding.of_prompt, given, params, priority)


def read_classifications(
    ids: Iterator[str],
    prompts: Prompt | Sequence[Prompt],
    pooling_params: PoolingParams | Sequence[PoolingParams] | None,
    priority: int | Sequence[int] | None = None,
) -> list[OfflineClassification]:
    """Prompts to classify. Raises QuireError, TypeError and ValueError."""
    given = prompts_of(prompts)
    params = params_of(pooling_params, PoolingParams(), len(given), "pooling_params")
    return _read_prompts(ids, OfflineClassification.of_prompt, given, params, priority)


def read_scores(
    ids: Iterator[str],
    text_1: Texts,
    text_2: Texts,
    pooling_params: PoolingParams | None,
    priority: int | None = None,
    instruction: str | None = None,
) -> list[OfflineScores]:
    """Pairs to compare. Raises QuireError and TypeError."""
    (params,) = params_of(pooling_params, PoolingParams(), 1, "pooling_params")
    with client_errors():
        return [
            OfflineScores.of_texts(next(ids), texts, params, plain(priority), instruction)
            for texts in TextPairs.split(text_1, text_2)
        ]


def default_params(defaults: GenerationDefaults) -> SamplingParams:
    """What requests have that do not set a parameter."""
    return SamplingParams(**defaults.sampling, max_tokens=defaults.max_tokens)


def refuse_adapter(lora_request: object) -> None:
    """vLLM's argument may only be None. Raises ValueError."""
    if lora_request is not None:
        raise ValueError("lora_request: adapters are not served")


def _priorities(given: int | Sequence[int] | None, num_prompts: int) -> Sequence[int | None]:
    """Of each prompt. Raises TypeError, and ValueError where their number is not that of the prompts."""
    if given is None or isinstance(given, int | Integral):
        return [plain(given)] * num_prompts
    require_list(given, "priority", "a number, or a list with one for each prompt")
    if len(given) != num_prompts:
        raise ValueError(f"priority has {len(given)} numbers for {num_prompts} prompts")
    return [plain(one) for one in given]


def _read_prompts(
    ids: Iterator[str],
    read: Callable[[str, Prompt, P, int | None], R],
    prompts: Sequence[Prompt],
    params: Sequence[P],
    priority: int | Sequence[int] | None,
) -> list[R]:
    """Each prompt with its parameters and its priority. Raises as `_priorities` and `_read` do."""

    def reader(prompt: Prompt, one: P, number: int | None) -> Callable[[str], R]:
        return lambda request_id: read(request_id, prompt, one, number)

    return _read(ids, list(map(reader, prompts, params, _priorities(priority, len(prompts)))))


def _read(ids: Iterator[str], readers: Sequence[Callable[[str], R]]) -> list[R]:
    """Each request with an id. Raises QuireError."""
    requests = []
    with client_errors():
        for index, read in enumerate(readers):
            with noting_prompt(index, len(readers)):
                requests.append(read(next(ids)))
    return requests
