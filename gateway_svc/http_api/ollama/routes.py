"""Routes of Ollama's API: chat, generation, embeddings, and the models."""

import time
from dataclasses import replace
from typing import Any

from gateway_svc.client_call import Call
from gateway_svc.embeddings import UnvalidatedEmbeddings
from gateway_svc.field_paths import Field, NamedFields
from gateway_svc.http_api.answer_sender import Output, rendering_cost
from gateway_svc.http_api.calls import HttpCalls, InputValues
from gateway_svc.http_api.endpoint import GENERATION_HEADERS, Handler, HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.ollama.answer_models import (
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaLoadedModels,
    OllamaModelInfo,
    OllamaModels,
)
from gateway_svc.http_api.ollama.answers import OllamaBuilder, OllamaForm, embed_answer, now
from gateway_svc.http_api.ollama.errors import OLLAMA_ERRORS
from gateway_svc.http_api.ollama.models import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    ShowBody,
)
from gateway_svc.http_api.ollama.requests import (
    OllamaRequest,
    read_chat,
    read_embed,
    read_embeddings_prompt,
    read_generate,
)
from gateway_svc.http_api.service_routes import VersionAnswer, software_version
from gateway_svc.model_catalog import CatalogModel
from gateway_svc.output import Chunk, Usage
from gateway_svc.request_manager import RequestManager
from gateway_svc.tracing import Operation
from svc_common.model_tasks import ModelTask

_NDJSON = "application/x-ndjson"
_TAG = ":latest"
_NEVER = "9999-12-31T23:59:59Z"
_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def _posted(path: str, handle: Handler, doc: HandlerDoc) -> HttpRoute:
    """A route with a body. Some clients send it as curl and HTTP libraries do unless asked: as a form, or untyped."""
    return HttpRoute(path, {"POST": handle}, OLLAMA_ERRORS, {"POST": doc}, takes_any_type=True)


class OllamaRoutes:
    """Handlers; answers and errors are in the formats of the protocol."""

    def __init__(self, request_manager: RequestManager, calls: HttpCalls) -> None:
        self._request_manager = request_manager
        self._calls = calls
        self._started_at = now()

    def routes(self) -> list[HttpRoute]:
        lines = HandlerDoc(error=OllamaError, headers=GENERATION_HEADERS, event_type=_NDJSON)
        chat = replace(lines, body=OllamaChatBody, answer=OllamaChatAnswer, event=OllamaChatAnswer)
        generate = replace(lines, body=OllamaGenerateBody, answer=OllamaGenerateAnswer, event=OllamaGenerateAnswer)
        embed = HandlerDoc(OllamaEmbedBody, OllamaEmbedAnswer, error=OllamaError)
        embeddings = HandlerDoc(OllamaEmbeddingsBody, OllamaEmbeddingsAnswer, error=OllamaError)
        show = HandlerDoc(ShowBody, OllamaModelInfo, error=OllamaError)
        tags = HandlerDoc(answer=OllamaModels, error=OllamaError)
        loaded = HandlerDoc(answer=OllamaLoadedModels, error=OllamaError)
        version = HandlerDoc(answer=VersionAnswer, error=OllamaError)
        running = HandlerDoc(error=OllamaError, needs_credential=False, content_type="text/plain")
        return [
            _posted("/api/chat", self.chat, chat),
            _posted("/api/generate", self.generate, generate),
            _posted("/api/embed", self.embed, embed),
            _posted("/api/embeddings", self.embeddings, embeddings),
            _posted("/api/show", self.show, show),
            HttpRoute("/api/tags", {"GET": self.tags}, OLLAMA_ERRORS, {"GET": tags}),
            HttpRoute("/api/ps", {"GET": self.ps}, OLLAMA_ERRORS, {"GET": loaded}),
            HttpRoute("/api/version", {"GET": self.version}, OLLAMA_ERRORS, {"GET": version}),
            HttpRoute("/", {"GET": self.running}, OLLAMA_ERRORS, {"GET": running}),
        ]

    async def chat(self, exchange: HttpExchange) -> None:
        """Answers a chat, in lines of JSON unless stream is false."""
        call = self._calls.call(exchange, Operation.CHAT)
        read = await self._calls.read(exchange, call, OllamaChatBody, read_chat)
        await self._answer(exchange, call, read, OllamaForm.CHAT)

    async def generate(self, exchange: HttpExchange) -> None:
        """Answers a prompt, in lines of JSON unless stream is false."""
        call = self._calls.call(exchange, Operation.TEXT_COMPLETION)
        read = await self._calls.read(exchange, call, OllamaGenerateBody, read_generate)
        await self._answer(exchange, call, read, OllamaForm.GENERATE)

    async def embed(self, exchange: HttpExchange) -> None:
        """Embeds texts: each becomes a vector of the length 1."""
        call = self._calls.call(exchange, Operation.EMBEDDINGS)
        read = await self._calls.read(exchange, call, OllamaEmbedBody, read_embed, may_have_name=False)
        embedded = await self._embedded(exchange, call, read)
        if not embedded.values:
            await exchange.respond_json({"model": embedded.model, "embeddings": []})
            return
        seconds = time.monotonic() - call.arrival_time  # without the wait for a thread that makes the answer
        await self._calls.answers.respond_with_values(
            exchange, call, lambda: embed_answer(embedded, seconds), num_values=embedded.num_numbers
        )

    async def embeddings(self, exchange: HttpExchange) -> None:
        """Embeds a text: an earlier form of /api/embed, whose vector is not normalized."""
        call = self._calls.call(exchange, Operation.EMBEDDINGS)
        read = await self._calls.read(exchange, call, OllamaEmbeddingsBody, read_embeddings_prompt, may_have_name=False)
        embedded = await self._embedded(exchange, call, read)
        await self._calls.answers.respond_with_values(
            exchange,
            call,
            lambda: {"embedding": embedded.values[0].tolist() if embedded.values else []},
            num_values=embedded.num_numbers,
        )

    async def tags(self, exchange: HttpExchange) -> None:
        """The models that are ready, once for each of their names."""
        ready = self._request_manager.ready_models(self._calls.tenant(exchange))
        about = {"modified_at": self._started_at, "size": 0, "digest": "", "details": _DETAILS}
        models = [{"name": name, "model": name, **about} for model, _ in ready for name in model.names]
        await exchange.respond_json({"models": models})

    async def ps(self, exchange: HttpExchange) -> None:
        """The models that are ready: all of them stay loaded."""
        ready = self._request_manager.ready_models(self._calls.tenant(exchange))
        about = {"size": 0, "size_vram": 0, "digest": "", "details": _DETAILS, "expires_at": _NEVER}
        models = [
            {"name": name, "model": name, **about, "context_length": info.context_length}
            for model, info in ready
            for name in model.names
        ]
        await exchange.respond_json({"models": models})

    async def show(self, exchange: HttpExchange) -> None:
        """One model."""
        call = self._calls.call(exchange, Operation.CHAT)
        body = await self._calls.read(exchange, call, ShowBody, lambda body, _: body)
        named = "model" if body.model is not None or body.name is None else "name"
        name = self._model_name(body.name if named == "name" else body.model)
        model, info = self._calls.find_model(exchange, call, name, NamedFields({Field.MODEL: named}))
        template = model.tokenizer.chat_template
        await exchange.respond_json(
            {
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in model.given_defaults.items()),
                "template": "" if template is None else template.source,
                "details": _DETAILS,
                # Clients look for the context under the name of the architecture.
                "model_info": {
                    "general.architecture": "quire",
                    "general.basename": model.name,
                    "quire.context_length": info.context_length,
                },
                "capabilities": _capabilities(model),
                "modified_at": self._started_at,
            }
        )

    async def running(self, exchange: HttpExchange) -> None:
        """Says that the process answers; the command `ollama` asks first."""
        await exchange.respond(b"Quire is running", "text/plain; charset=utf-8")

    async def version(self, exchange: HttpExchange) -> None:
        """The version of this software, not one of Ollama."""
        self._calls.tenant(exchange)
        await exchange.respond_json({"version": software_version()})

    async def _answer(self, exchange: HttpExchange, call: Call, read: OllamaRequest, form: OllamaForm) -> None:
        unvalidated, field_path = read.prompt.unvalidated, read.prompt.field_path
        unvalidated = replace(unvalidated, model=self._model_name(unvalidated.model))
        if read.loads:
            model, _ = self._calls.find_model(exchange, call, unvalidated.model, field_path)
            await exchange.respond_json(form.loaded(model.name))
            return
        requests = await self._calls.validate(exchange, call, [replace(read.prompt, unvalidated=unvalidated)])
        async with self._calls.run(exchange, call, requests) as group:
            (rendering,) = group.renderings
            answer = OllamaBuilder(form, rendering, group.vocabulary, lambda: group.usage, call.arrival_time)
            if read.is_streamed:

                def render(output: Output) -> bytes:
                    return b"".join([answer.lines(chunk) for _, chunk in output])

                # No lines but those of the answer: clients parse each.
                await exchange.start_stream(_NDJSON)
                await self._calls.answers.send_output(exchange, call, group, render, rendering_cost)
                answer.end()
                await exchange.end_events(answer.last_lines())
                return
            chunks: list[Chunk] = []
            while pieces := await group.next():
                answer.begin()
                chunks += [chunk for _, chunk in pieces]
            answer.end()
            await self._calls.answers.respond_with_output(
                exchange,
                call,
                lambda: answer.whole(chunks),
                num_chunks=len(chunks),
                num_logprobs=group.num_logprobs,
            )

    async def _embedded(self, exchange: HttpExchange, call: Call, unvalidated: UnvalidatedEmbeddings) -> InputValues:
        """The vectors of all inputs. Without inputs, which loads a model in Ollama, there are none."""
        named = replace(unvalidated, model=self._model_name(unvalidated.model))
        if unvalidated.inputs:
            return await self._calls.embed(exchange, call, named)
        model, _ = self._calls.find_model(exchange, call, named.model, named.field_path)
        return InputValues([], model.name, Usage())

    def _model_name(self, name: str | None) -> str | None:
        """The name without Ollama's tag for names that have none."""
        if name is None or self._request_manager.catalog.get(name) is not None:
            return name
        return name.removesuffix(_TAG)


def _capabilities(model: CatalogModel) -> list[Any]:
    has_template = model.tokenizer.chat_template is not None
    if model.task is not ModelTask.GENERATE:
        return ["embedding"] if model.task is ModelTask.EMBED else []
    return [
        "completion",
        *(["insert"] if model.tokenizer.infill_form is not None else []),
        *(["tools"] if has_template and model.message_format.tools is not None else []),
        *(["thinking"] if has_template and model.message_format.reasoning is not None else []),
    ]
