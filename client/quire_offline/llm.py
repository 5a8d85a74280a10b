"""`LLM`: a model in this process, for lists of prompts, with the methods of vLLM's class."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from quire_offline.engine_thread import EngineThread
from quire_offline.errors import client_errors, noting_prompt
from quire_offline.offline_request import Messages, OfflineRequest, Prompt, chats_of, prompts_of
from quire_offline.outputs import RequestOutput
from quire_offline.progress import ProgressBar
from quire_offline.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None
"""Of all prompts of a call, or one for each; None: all have their defaults."""


class LLM:
    """A model that this process computes. Use it as a context manager, or call `close`. Threads may share it.

    `model` is a directory, a GGUF file or a hub id; unset: QUIRE_MODEL, or the default model. `options` are settings of
    worker, gateway and scheduler by their names without QUIRE_ (docs/settings.md), such as dtype, max_model_len,
    num_blocks, chat_template or drafter; arguments of vLLM's class have the effect of the flags of `quire serve`
    (docs/from-vllm.md). Loading takes seconds to minutes.

    Raises TypeError for an option that does not exist and ValueError for a value that cannot be used. ModelNotFound,
    InvalidModelFiles, BadSetting and StartupFailed say why the model cannot be served here.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._thread = EngineThread({"model": model, **options})
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._thread.engine.description.model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts, all at once, and returns their outputs in the order of the prompts.

        A prompt is a text, token ids, or an object with `prompt` or `prompt_token_ids`. `use_tqdm` is whether a
        progress bar is shown; None: on a terminal. `priority` has a number for each prompt; a higher one goes first,
        where in vLLM a lower one does.

        Raises QuireError, as a client of a server does: for a field that is not valid, with its name and a note about
        the prompt, before or while the others run. KeyboardInterrupt cancels all of them.
        """
        given = prompts_of(prompts)
        params = _params_of(sampling_params, len(given))
        priorities = [None] * len(given) if priority is None else list(priority)
        if len(priorities) != len(given):
            raise ValueError(f"priority has {len(priorities)} numbers for {len(given)} prompts")
        requests = self._read(
            [
                partial(OfflineRequest.of_prompt, prompt=prompt, params=one, priority=number)
                for prompt, one, number in zip(given, params, priorities, strict=True)
            ]
        )
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one chat, or several, given as /v1/chat/completions takes them. `options` are other fields of its
        body, such as tool_choice and reasoning_effort. Otherwise as `generate`.
        """
        given = chats_of(messages)
        params = _params_of(sampling_params, len(given))
        fields = options | {
            "tools": None if tools is None else list(tools),
            "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        requests = self._read(
            [
                partial(OfflineRequest.of_chat, messages=chat, params=one, options=fields)
                for chat, one in zip(given, params, strict=True)
            ]
        )
        return self._run(requests, use_tqdm)

    def close(self) -> None:
        """Ends the engine and its threads, and frees the model. Calls that run raise QuireError CANCELLED."""
        self._thread.close()

    def _run(self, requests: Sequence[OfflineRequest], use_tqdm: bool | None) -> list[RequestOutput]:
        engine = self._thread.engine
        with client_errors(), ProgressBar(len(requests), use_tqdm) as bar:
            self._thread.run(engine.run_all(requests, bar.on_tokens))
        # On this thread: it may take long to render many log-probabilities, and others' steps must not wait for it.
        return [request.output(finished=True) for request in requests]

    def _read(self, readers: Sequence[Callable[[str], OfflineRequest]]) -> list[OfflineRequest]:
        """The requests of a call, each with an id. Raises QuireError."""
        requests = []
        with client_errors():
            for index, read in enumerate(readers):
                with noting_prompt(index, len(readers)):
                    requests.append(read(str(next(self._numbers))))
        return requests


def _params_of(given: Params, num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt. Raises ValueError where their number is not that of the prompts."""
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise ValueError(f"there are {len(given)} sampling_params for {num_prompts} prompts")
    return list(given)
