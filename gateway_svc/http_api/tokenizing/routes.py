"""vLLM's routes of the tokenizer: /tokenize, /detokenize and /tokenizer_info."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway_svc.chats import ChatPrompt
from gateway_svc.field_checker import FieldChecker
from gateway_svc.field_paths import Field, FieldPath, NamedFields, contract_field_path
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.endpoint import HandlerDoc, HttpRoute
from gateway_svc.http_api.exchange import HttpExchange
from gateway_svc.http_api.json_body import invalid
from gateway_svc.http_api.openai import chat_fields
from gateway_svc.http_api.openai.answer_models import ErrorAnswer
from gateway_svc.http_api.openai.errors import OPENAI_ERRORS
from gateway_svc.http_api.tokenizing.models import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    TokenizerInfoAnswer,
)
from gateway_svc.request_manager import RequestManager
from gateway_svc.tracing import Operation
from gateway_svc.unvalidated_request import TextPrompt
from gateway_svc.validated_request import SpecialTokens

_NAMES: Mapping[str, str] = {**chat_fields.NAMES, Field.TEXT: "prompt", Field.TOKEN_IDS: "tokens"}


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """What is to be tokenized."""

    model: str | None
    prompt: TextPrompt | ChatPrompt
    field_path: FieldPath
    return_token_strs: bool = False


def read_tokenize(body: TokenizeBody, _: str | None = None) -> TokenizeRequest:
    """The text or chat of a body. Raises QuireError."""
    with_strs = bool(body.return_token_strs)
    if body.prompt is not None:
        if body.messages is not None:
            raise invalid("messages", "must not be beside prompt")
        text = TextPrompt(body.prompt, body.add_special_tokens is not False)
        return TokenizeRequest(body.model, text, NamedFields(_NAMES), with_strs)
    chat = chat_fields.read_chat(body, body.messages)
    if chat.prompt is None:
        raise invalid("prompt", "must be given, or messages")
    return TokenizeRequest(body.model, chat.prompt, NamedFields({**_NAMES, **chat.names}), with_strs)


class TokenizingRoutes:
    """Handlers; errors are in OpenAI's format, as in vLLM."""

    def __init__(self, request_manager: RequestManager, calls: HttpCalls) -> None:
        self._request_manager = request_manager
        self._calls = calls

    def routes(self) -> list[HttpRoute]:
        tokenize = HandlerDoc(TokenizeBody, TokenizeAnswer, error=ErrorAnswer)
        detokenize = HandlerDoc(DetokenizeBody, DetokenizeAnswer, error=ErrorAnswer)
        info = HandlerDoc(answer=TokenizerInfoAnswer, error=ErrorAnswer)
        return [
            HttpRoute("/tokenize", {"POST": self.tokenize}, OPENAI_ERRORS, {"POST": tokenize}),
            HttpRoute("/detokenize", {"POST": self.detokenize}, OPENAI_ERRORS, {"POST": detokenize}),
            HttpRoute("/tokenizer_info", {"GET": self.tokenizer_info}, OPENAI_ERRORS, {"GET": info}),
        ]

    async def tokenize(self, exchange: HttpExchange) -> None:
        """The tokens of a text or of a chat."""
        call = self._calls.call(exchange, Operation.TEXT_COMPLETION)
        read = await self._calls.read(exchange, call, TokenizeBody, read_tokenize)
        found = self._calls.find_model(exchange, call, read.model, read.field_path)
        token_ids = await self._calls.encode(call, found, read.prompt, read.field_path)
        model, info = found
        tenant = call.tenant.name
        strs = await model.tokenizer.token_strs(token_ids, tenant) if read.return_token_strs else None
        answer = {
            "count": len(token_ids),
            "max_model_len": info.context_length,
            "tokens": token_ids,
            "token_strs": strs,
        }
        await self._calls.answers.respond_with_values(
            exchange, call, lambda: answer, num_values=len(token_ids) + len(strs or ())
        )

    async def detokenize(self, exchange: HttpExchange) -> None:
        """The text of tokens, with special ones."""
        call = self._calls.call(exchange, Operation.TEXT_COMPLETION)
        body = await self._calls.read(exchange, call, DetokenizeBody, lambda body, _: body)
        if body.tokens is None:
            raise invalid("tokens", "must be given")
        names = NamedFields(_NAMES)
        model, info = self._calls.find_model(exchange, call, body.model, names)
        self._calls.check_length(Field.TOKEN_IDS, len(body.tokens), info, names)
        FieldChecker(names).token_ids(Field.TOKEN_IDS, body.tokens, info)
        text = await model.tokenizer.decode(body.tokens, SpecialTokens.KEPT, call.tenant.name)
        await self._calls.answers.respond_with_values(
            exchange, call, lambda: {"prompt": text}, num_values=len(body.tokens)
        )

    async def tokenizer_info(self, exchange: HttpExchange) -> None:
        """The configuration of the first model's tokenizer, with the chat template in use."""
        tenant = self._calls.tenant(exchange)
        model = self._request_manager.catalog.find(None, contract_field_path, tenant)
        exchange.model = model.name
        template = model.tokenizer.chat_template
        own = {} if template is None else {"chat_template": template.source}
        await exchange.respond_json({"tokenizer_class": "PreTrainedTokenizerFast", **model.tokenizer.config, **own})
