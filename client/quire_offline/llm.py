"""`LLM`: a model in this process, for lists of prompts, with the methods of vLLM's class."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from quire_offline.calls import (
    chat_options,
    default_params,
    read_chats,
    read_classifications,
    read_embeddings,
    read_prompts,
    read_scores,
    refuse_adapter,
)
from quire_offline.engine import R
from quire_offline.engine_thread import EngineThread
from quire_offline.errors import client_errors
from quire_offline.offline_request import Messages, Prompt
from quire_offline.offline_values import Texts
from quire_offline.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire_offline.pooling_params import PoolingParams
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

    Raises TypeError for an option that does not exist and ValueError for a value that cannot be used. Its subclass
    LoadError says why the model cannot be served here.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._thread = EngineThread({"model": model, **options})
        self._ids = map(str, itertools.count())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._thread.engine.description.model

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels of the model's head; empty: it has none."""
        return self._thread.engine.labels

    def get_tokenizer(self) -> Any:
        """A new tokenizer of the model's files, of transformers, as in vLLM. Raises OSError and ValueError."""
        return self._thread.engine.load_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of generation_config and override_generation_config. Others have the API's defaults."""
        return default_params(self._thread.engine.generation_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Continues prompts, all at once, and returns their outputs in the order of the prompts.

        A prompt is a text, token ids, or an object with `prompt` or `prompt_token_ids`. `use_tqdm` is whether a
        progress bar is shown; None: on a terminal. `priority` is a number for all prompts, or one for each; a higher
        one goes first, where in vLLM a lower one does. `lora_request` may only be None: adapters are not served.

        Raises QuireError, as a client of a server does: for a field that is not valid, with its name and a note about
        the prompt, before or while the others run. KeyboardInterrupt cancels all of them.
        """
        refuse_adapter(lora_request)
        requests = read_prompts(self._ids, prompts, sampling_params, priority)
        self._run(requests, use_tqdm)
        # On this thread: it may take long to render many log-probabilities, and others' steps must not wait for it.
        return [request.output(finished=True) for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one chat, or several, given as /v1/chat/completions takes them. `options` are other fields of its
        body, such as add_generation_prompt, continue_final_message, tool_choice and reasoning_effort. Otherwise as
        `generate`.
        """
        refuse_adapter(lora_request)
        fields = chat_options(tools, chat_template_kwargs, options)
        requests = read_chats(self._ids, messages, sampling_params, fields, priority)
        self._run(requests, use_tqdm)
        return [request.output(finished=True) for request in requests]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: int | Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, by an embedding model. Otherwise as `generate`."""
        refuse_adapter(lora_request)
        requests = read_embeddings(self._ids, prompts, pooling_params, priority)
        self._run(requests, use_tqdm)
        return [request.output() for request in requests]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: int | Sequence[int] | None = None,
        lora_request: None = None,
    ) -> list[ClassificationRequestOutput]:
        """A number for each label of each prompt, by a model with a head for them. `labels` has their names.
        Otherwise as `generate`.
        """
        refuse_adapter(lora_request)
        requests = read_classifications(self._ids, prompts, pooling_params, priority)
        self._run(requests, use_tqdm)
        return [request.output() for request in requests]

    def score(
        self,
        text_1: Texts,
        text_2: Texts,
        *,
        use_tqdm: bool | None = None,
        pooling_params: PoolingParams | None = None,
        priority: int | None = None,
        instruction: str | None = None,
        lora_request: None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of one text with each of others, or of each with the other one at its place: the output of a
        cross-encoder, or the cosine of the vectors of an embedding model. `instruction` says what is asked for, to a
        model whose chat template writes one beside a pair. Otherwise as `embed`.
        """
        refuse_adapter(lora_request)
        requests = read_scores(self._ids, text_1, text_2, pooling_params, priority, instruction)
        self._run(requests, use_tqdm)
        return [output for request in requests for output in request.outputs()]

    def close(self) -> None:
        """Ends the engine and its threads, and frees the model. Calls that run raise QuireError CANCELLED."""
        self._thread.close()

    def _run(self, requests: Sequence[R], use_tqdm: bool | None) -> None:
        engine = self._thread.engine
        num_prompts = sum(request.num_prompts for request in requests)
        with client_errors(), ProgressBar(num_prompts, use_tqdm) as bar:
            self._thread.run(engine.run_all(requests, bar.on_progress))
