"""Builds request messages from Python values: pure functions, shared by both clients."""

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal, TypedDict, cast

from quire.inference.v1 import inference_pb2 as pb
from quire_client.chats import CHAT_OPTIONS, AnyTool, Messages, ToolChoice, chat_message, set_chat_options
from quire_client.fields import assign
from quire_client.resumable_stream import OnResume

Prompt = str | Sequence[int]
"""Text, or token ids that are used unchanged."""


EarlyStopping = bool | Literal["never"]
"""When a beam search with enough finished sequences ends: at once (True), when no better one is likely (False), or when
no better one is possible ("never")."""

_EARLY_STOPPINGS: dict[EarlyStopping, pb.EarlyStopping] = {
    False: pb.EARLY_STOPPING_HEURISTIC,
    True: pb.EARLY_STOPPING_AT_WIDTH,
    "never": pb.EARLY_STOPPING_NEVER,
}


TruncationSide = Literal["left", "right"]

_TRUNCATION_SIDES: dict[TruncationSide, pb.TruncationSide] = {
    "left": pb.TRUNCATION_SIDE_LEFT,
    "right": pb.TRUNCATION_SIDE_RIGHT,
}

Retention = int | Literal["none", "until_end"]
"""How long the record of a request is kept: seconds after its end, only while it runs ("until_end"), or nothing is ever
recorded ("none")."""


class GenerationOptions(TypedDict, total=False):
    """Keyword arguments of every call that generates. None is the same as absent; the server checks ranges.

    Where sampling parameters and max_tokens are absent, the operator or the model's generation_config.json may have set
    other values than those named here.
    """

    model: str | None
    """A name or an alias from `models()`. Absent: the first model of the gateway."""
    temperature: float | None
    """0 to 2; 0 is greedy. Absent: 1."""
    top_p: float | None
    """Keep the smallest set of tokens whose probability reaches this. Absent: 1, all."""
    top_k: int | None
    """Keep the top k tokens. Absent, 0 or -1: all."""
    min_p: float | None
    """Drop tokens below this share of the highest probability. Absent: 0."""
    typical_p: float | None
    """Keep the most typical tokens whose probability reaches this. Absent: 1, all."""
    presence_penalty: float | None
    """Subtracted from the logit of each token that was generated before. Absent: 0."""
    frequency_penalty: float | None
    """Subtracted once per time that a token was generated before. Absent: 0."""
    repetition_penalty: float | None
    """Weakens each token of prompt and output by this factor. Absent: 1."""
    seed: int | None
    """Makes sampling repeatable. Absent: chosen at random, and returned with the acceptance."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None
    """The only tokens that are sampled. Absent: all."""
    bad_words: Sequence[str] | None
    """Texts that are not generated."""
    max_tokens: int | None
    """The most tokens to generate; 0 with echo or prompt_logprobs for the prompt alone. Absent: the rest of the
    context."""
    min_tokens: int | None
    """No end-of-text and no stop before this many tokens. Absent: 0."""
    stop: str | Sequence[str] | None
    """Text, or texts, that end a sequence and are not returned."""
    stop_token_ids: Sequence[int] | None
    """Token ids that end a sequence and whose text is not returned."""
    ignore_eos: bool | None
    """Continue after the model's end-of-text token."""
    include_stop: bool | None
    """Return the matched stop string at the end of the text, or the text of the token that ends it."""
    n: int | None
    """How many independent sequences; of a beam search, the best ones. Absent: 1."""
    best_of: int | None
    """How many to generate, of which the n with the highest log-probability per token are returned. Not streamed
    unless it is n. Absent: n."""
    beam_width: int | None
    """Beam search with this width, instead of sampling. Not streamed."""
    length_penalty: float | None
    """Of a beam search: above 0 favours long sequences, below 0 short ones. Absent: 1."""
    early_stopping: EarlyStopping | None
    """When a beam search ends, as in transformers. Absent: False."""
    logprobs: int | None
    """Log-probabilities of each token and of this many top tokens. Absent: none."""
    logprob_token_ids: Sequence[int] | None
    """Also the log-probabilities of these tokens, at each token."""
    prompt_logprobs: int | None
    """Log-probabilities of each token of the prompt, and of this many top tokens. Absent: none."""
    echo: bool | None
    """Return the prompt, as tokens and text."""
    truncate_prompt_tokens: int | None
    """Keep this many tokens of the prompt; -1: as many as fit. Absent: a prompt that is too long is refused."""
    truncation_side: TruncationSide | None
    """Where that takes tokens away. Absent: at the left, so that the last tokens are kept."""
    request_id: str | None
    """Your own name for the request. A named request survives its client, and others can resume and cancel it. The same
    request under the same name returns the existing result."""
    priority: int | None
    """Requests of a higher priority run first. Absent: 0."""
    retention: Retention | None
    """How long Redis keeps the request's record, with prompt and output. Absent: the operator's default."""
    keep_special_tokens: bool | None
    """Keep special tokens in the text."""
    spaces_between_special_tokens: bool | None
    """Whether these have the spaces between them that the tokenizer writes. Absent: True."""
    tools: Sequence[AnyTool] | None
    """Of a chat: functions and custom tools that the model may call."""
    tool_choice: ToolChoice | None
    """Of a chat: "auto", "none", "required", the name of the tool that the model calls, or AllowedTools. Absent:
    "auto"."""
    parallel_tool_calls: bool | None
    """Of a chat: whether the answer may have several calls. Absent: True."""
    template_kwargs: Mapping[str, Any] | None
    """Of a chat: variables for the model's template."""
    reasoning_effort: str | None
    """Of a chat: "none", "minimal", "low", "medium", "high" or "xhigh", for templates that know it."""
    max_reasoning_tokens: int | None
    """Of a chat: the reasoning has at most this many tokens, and then it ends. Absent: no limit of its own."""
    json_schema: Mapping[str, Any] | str | None
    """The output is JSON that is valid under this JSON Schema, given as a mapping or as text."""
    json_object: bool | None
    """The output is a JSON object."""
    regex: str | None
    """The output matches this regular expression as a whole."""
    choice: Sequence[str] | None
    """The output is one of these texts."""
    grammar: str | None
    """The output matches this grammar, in Lark's syntax."""
    gbnf: str | None
    """The output matches this grammar, in GBNF, the syntax of llama.cpp."""


class CallOptions(GenerationOptions, total=False):
    """Options of a request, and of how it is called."""

    timeout: float | None
    """Deadline in seconds. Absent: the client's."""
    traceparent: str | None
    """The W3C trace that the request belongs to."""
    resume: bool | None
    """Whether the request is resumed where its call breaks. Absent: as the client."""
    on_resume: OnResume | None
    """Called with the error of a broken call, once a break, before the request is resumed."""


# The path of each option in a Generation.
_PATHS = {
    "model": "model",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "typical_p": "sampling.typical_p",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "repetition_penalty": "sampling.repetition_penalty",
    "seed": "sampling.seed",
    "logit_bias": "sampling.logit_bias",
    "allowed_token_ids": "sampling.allowed_token_ids",
    "bad_words": "sampling.bad_words",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "include_stop": "stopping.include_stop",
    "n": "n",
    "best_of": "best_of",
    "beam_width": "beam_search.width",
    "length_penalty": "beam_search.length_penalty",
    "early_stopping": "beam_search.early_stopping",
    "logprobs": "logprobs",
    "logprob_token_ids": "logprob_token_ids",
    "prompt_logprobs": "prompt_logprobs",
    "echo": "echo",
    "truncate_prompt_tokens": "truncate_prompt_tokens",
    "truncation_side": "truncation_side",
    "request_id": "request_id",
    "priority": "priority",
    "retention": "retention.seconds",
    "keep_special_tokens": "keep_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "json_schema": "constraint.json_schema",
    "json_object": "constraint.json_object",
    "regex": "constraint.regex",
    "choice": "constraint.choice.choices",
    "grammar": "constraint.grammar",
    "gbnf": "constraint.gbnf",
}
_CONSTRAINTS = [name for name, path in _PATHS.items() if path.startswith("constraint.")]


def completion_request(prompt: Prompt, options: GenerationOptions) -> pb.Generation:
    """A request to continue `prompt`.

    Raises TypeError for an option that does not exist or has the wrong type, QuireError INVALID_FIELD for a value that
    the message cannot hold.
    """
    generation = _with_options(options)
    check_prompt(prompt, "prompt")
    if isinstance(prompt, str):
        assign(generation, "text", prompt, within="generation.")
    else:
        generation.token_ids.SetInParent()  # sent even without ids: the server rejects an empty prompt
        assign(generation, "token_ids.ids", prompt, within="generation.")
    return generation


def check_prompt(prompt: object, name: str) -> None:
    """Raises TypeError for values that would be taken for token ids: bytes are integers, and booleans are 0 and 1."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be a text or token ids, not {type(prompt).__name__}")
    if isinstance(prompt, Sequence) and any(isinstance(one, bool) for one in prompt):
        raise TypeError(f"{name}: token ids must be integers, not bool")


def chat_request(messages: Messages, options: GenerationOptions) -> pb.Generation:
    """A request to answer a chat. Raises as completion_request."""
    of_chat = {name: value for name, value in options.items() if name in CHAT_OPTIONS}
    others = {name: value for name, value in options.items() if name not in CHAT_OPTIONS}
    generation = _with_options(cast(GenerationOptions, others))
    generation.chat.CopyFrom(chat_message(messages, within="generation.chat."))
    set_chat_options(generation.chat, of_chat, within="generation.chat.")
    return generation


def tokenize_request(text: str | Messages, model: str | None) -> pb.TokenizeRequest:
    """A request for the token ids of a text or a chat. Raises as completion_request."""
    request = pb.TokenizeRequest(model=model)
    if isinstance(text, str):
        assign(request, "text", text)
    else:
        request.chat.CopyFrom(chat_message(text, within="chat."))
    return request


def detokenize_request(token_ids: Sequence[int], model: str | None, keep_special_tokens: bool) -> pb.DetokenizeRequest:
    """A request for the text of token ids. Raises as completion_request."""
    request = pb.DetokenizeRequest(model=model, keep_special_tokens=keep_special_tokens)
    check_prompt(token_ids, "token_ids")
    assign(request, "token_ids", token_ids)
    return request


def resume_request(request_id: str, positions: Mapping[int, int]) -> pb.ResumeRequest:
    """A request for the rest of a stream, from each sequence's next offset on. Raises as completion_request."""
    request = pb.ResumeRequest()
    assign(request, "request_id", request_id)
    for number, (index, next_offset) in enumerate(positions.items()):
        position = request.positions.add()
        assign(position, "index", index, within=f"positions[{number}].")
        assign(position, "next_offset", next_offset, within=f"positions[{number}].")
    return request


def assign_request_id(generation: pb.Generation) -> str | None:
    """Names a request that has no name, by which it can be resumed, and returns that name."""
    if generation.HasField("request_id"):
        return None
    generation.request_id = uuid.uuid4().hex
    return generation.request_id


def _with_options(options: GenerationOptions) -> pb.Generation:
    generation = pb.Generation()
    constraints = [name for name in _CONSTRAINTS if options.get(name) not in (None, False)]
    if len(constraints) > 1:
        raise TypeError(f"{constraints[0]} and {constraints[1]} cannot both be given: a request has one constraint")
    for name, value in options.items():
        if name in CHAT_OPTIONS and value is not None:
            raise TypeError(f"{name} is an option of chats")
        if name not in _PATHS and name not in CHAT_OPTIONS:
            raise no_option(name, [*_PATHS, *CHAT_OPTIONS])
        if value is not None:
            _set_option(generation, name, value)
    return generation


def _set_option(generation: pb.Generation, name: str, value: Any) -> None:
    match name:
        case "retention" if not isinstance(value, Integral):
            retention(generation.retention, value)
        case "json_object":
            if not isinstance(value, bool):
                raise TypeError(f"json_object is True or False, not {value!r}")
            if value:
                generation.constraint.json_object.SetInParent()
        case _:
            value = _contract_value(name, value)
            if name == "choice":
                generation.constraint.choice.SetInParent()  # sent even without texts: the server rejects them
            assign(generation, _PATHS[name], value, within="generation.")


def _contract_value(name: str, value: Any) -> Any:
    """An option's value as the contract has it. Raises TypeError."""
    match name:
        case "bad_words" | "choice" if isinstance(value, str):
            raise TypeError(f"{name} is a list of texts, not a text")
        case "stop" if isinstance(value, str):
            return [value]
        case "early_stopping":
            return _early_stopping(value)
        case "truncation_side":
            return truncation_side(value)
        case "json_schema" if isinstance(value, Mapping):
            return json.dumps(value)
    return value


def no_option(name: str, options: Iterable[str]) -> TypeError:
    """The error to raise about an option that does not exist."""
    near = get_close_matches(name, list(options), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return TypeError(f"there is no option {name}{hint}")


def _early_stopping(value: Any) -> pb.EarlyStopping:
    # 0 and 1 equal False and True, but are not valid.
    if not isinstance(value, bool) and value != "never":
        raise TypeError(f'early_stopping is True, False or "never", not {value!r}')
    return _EARLY_STOPPINGS[value]


def truncation_side(value: Any) -> pb.TruncationSide:
    """A side in the contract. Raises TypeError."""
    if not isinstance(value, str) or value not in _TRUNCATION_SIDES:
        raise TypeError(f'truncation_side is "left" or "right", not {value!r}')
    return _TRUNCATION_SIDES[value]


def retention(message: pb.Retention, value: Any) -> None:
    """Sets a retention that is no number. Raises TypeError."""
    match value:
        case "none":
            message.none.SetInParent()
        case "until_end":
            message.until_end.SetInParent()
        case _:
            raise TypeError(f'retention is "none", "until_end" or a number of seconds, not {value!r}')
