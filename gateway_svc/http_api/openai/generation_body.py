"""The fields that bodies of /v1/completions and /v1/chat/completions share."""

import sys
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, WithJsonSchema

from gateway_svc.http_api.body_model import (
    BodyModel,
    ErrorMessage,
    Items,
    JsonObject,
    Neutral,
    Notes,
    Number,
    OneOrMoreTexts,
    misfit,
    option,
)
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.constraint_models import ConstraintBody
from gateway_svc.http_api.openai.prompt_fields import PromptField, RetentionField, SideField
from gateway_svc.sampling_fields import SAMPLING_FIELDS, Least

_SAMPLING = {one.name: one for one in SAMPLING_FIELDS}
_INT64 = 2**63
_MAX_WRONG = 8  # names that an error has
_MAX_SHOWN = 20  # characters of each


def _sampled(name: str, description: str) -> Any:
    one = _SAMPLING[name]
    least = "exclusiveMinimum" if one.bound is Least.EXCLUDED else "minimum"
    bounds: dict[str, Any] = {least: one.least, "maximum": one.most}
    if one.may_be_configured:  # a default here would be one that generated clients may send
        return option(
            f"{description} Absent: as the model's files or the operator say, else {one.default:g}.", **bounds
        )
    return option(description, one.default, **bounds)


def _logit_bias(biases: dict[Any, Any]) -> dict[int, float]:
    read: dict[int, float] = {}
    wrong = [name for name in biases if not (name.isascii() and name.isdigit() and len(name) < 20)]
    if wrong:
        shown = ", ".join(repr(name[:_MAX_SHOWN]) for name in wrong[:_MAX_WRONG])
        raise misfit(f"must have token ids as names, not {shown}{', …' if len(wrong) > _MAX_WRONG else ''}")
    for name, bias in biases.items():
        if type(bias) not in (int, float):
            raise misfit("must have numbers as values")
        if not abs(bias) <= sys.float_info.max:
            raise misfit("must have finite numbers as values")
        read[int(name)] = float(bias)
    return read


LogitBias = Annotated[
    JsonObject,
    AfterValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]


class StreamOptions(BodyModel):
    """Options of a stream."""

    without_effect: ClassVar[Notes] = unsupported_fields.STREAM_OPTIONS

    include_usage: bool | None = option(
        "Whether the last event has the usage. The operator may have it sent in every stream.", False
    )
    continuous_usage_stats: bool | None = option(
        "Whether each event has the usage of its choice so far; needs include_usage.", False
    )


class GenerationBody(ConstraintBody):
    """What is to be generated, and how."""

    without_effect: ClassVar[Notes] = unsupported_fields.WITHOUT_EFFECT

    model: str | None = option("Name or alias of the model; absent: the first model.")
    max_tokens: int | None = option("The most tokens of each answer; 0 where only the prompt is returned.", minimum=0)
    max_completion_tokens: int | None = option("The newer name of max_tokens, which it replaces.", minimum=0)
    min_tokens: int | None = option("The fewest tokens of each answer.", 0, minimum=0)
    temperature: Number | None = _sampled("temperature", "0 takes the most probable token.")
    top_p: Number | None = _sampled("top_p", "Samples from the most probable tokens with this probability together.")
    top_k: int | None = _sampled("top_k", "Samples from so many most probable tokens; 0 or -1: from all.")
    min_p: Number | None = _sampled("min_p", "The least probability of a token, relative to the most probable one.")
    typical_p: Number | None = _sampled("typical_p", "Samples from the most typical tokens with this probability.")
    presence_penalty: Number | None = _sampled("presence_penalty", "Penalty of tokens that the answer has.")
    frequency_penalty: Number | None = _sampled("frequency_penalty", "Penalty of tokens, times their count so far.")
    repetition_penalty: Number | None = _sampled("repetition_penalty", "Divides logits of tokens that occurred.")
    seed: int | None = option("Repeats the samples of another request.", minimum=-_INT64, maximum=_INT64 - 1)
    logit_bias: LogitBias | None = option("Is added to the logits of tokens, by their ids.", maxProperties=1024)
    allowed_token_ids: Items[int] | None = option("The only tokens that are sampled.", minItems=1, maxItems=16_384)
    bad_words: Items[str] | None = option(
        "Texts that are not generated, of 1 to 1,024 characters each. The prompt does not count.", maxItems=1024
    )
    logprob_token_ids: Items[int] | None = option(
        "Tokens whose log-probabilities are returned with each token, instead of the most probable ones.", maxItems=128
    )
    prompt_logprobs: int | None = option(
        "The number of most probable tokens to return for each token of the prompt; not in streams.",
        minimum=0,
    )
    truncate_prompt_tokens: int | None = option(
        "Keeps so many tokens of the prompt; -1: as many as fit beside max_tokens.", minimum=-1
    )
    truncation_side: SideField | None = option(
        "Where truncate_prompt_tokens takes tokens away: at the beginning or at the end of the prompt.", "left"
    )
    stop: OneOrMoreTexts | None = option(
        "Texts that end the answer, which is returned without them. At most 64, of 1 to 1,024 characters."
    )
    stop_token_ids: Items[int] | None = option("Tokens that end the answer.", maxItems=64)
    include_stop_str_in_output: bool | None = option(
        "Whether the answer has the stop text, or the text of the token, that ends it.", False
    )
    ignore_eos: bool | None = option("Whether the model's end-of-text token is generated as any other.", False)
    skip_special_tokens: bool | None = option("Whether special tokens are left out of the text.", True)
    spaces_between_special_tokens: bool | None = option(
        "Whether special tokens in the text have the spaces between them that the tokenizer writes.", True
    )
    n: int | None = option("The number of answers.", 1, minimum=1, maximum=128)
    best_of: int | None = option("The number of answers of which the n best are returned.", minimum=1, maximum=128)
    use_beam_search: bool | None = option("A beam search, whose width is best_of, or else n.", False)
    length_penalty: Number | None = option("Of a beam search.", 1, minimum=-10, maximum=10)
    early_stopping: Annotated[bool | Literal["never"], ErrorMessage('must be true, false or "never"')] | None = option(
        "When a beam search ends.", False
    )
    stream: bool | None = option("Whether the answer comes as server-sent events.", False)
    stream_options: StreamOptions | None = option("Options of a stream.")
    return_token_ids: bool | None = option("Whether the answer has the token ids of prompt and output.", False)
    return_tokens_as_token_ids: bool | None = option(
        "Whether log-probabilities have token_id:N instead of the text of a token. The operator may set true for "
        "requests without it.",
        False,
    )
    service_tier: str | None = option("How to bill: without effect. The answer has the tier default.")
    priority: int | None = option("A higher one goes first.", 0, minimum=-(2**31), maximum=2**31 - 1)
    cache_salt: str | None = option(
        "Only requests of the tenant with the same text share cached prefixes, as in vLLM.", minLength=1, maxLength=1024
    )
    retention: RetentionField | None = option(
        "How long the request's record is kept: none, until_end, or seconds after its end."
    )


class CompletionBody(GenerationBody):
    """A body of /v1/completions."""

    unserved: ClassVar[Neutral] = unsupported_fields.COMPLETION

    prompt: PromptField | None = option("A text, token ids, or a list of at most 1,024 of them. Each is continued.")
    suffix: str | None = option("The text behind the gap that the answer fills, if the model has tokens for that.", "")
    add_special_tokens: bool | None = option(
        "Whether the tokenizer adds its special tokens to a text, such as one for its beginning.", True
    )
    logprobs: int | None = option("The number of most probable tokens to return for each.", minimum=0)
    echo: bool | None = option(
        "Whether the text begins with the prompt, and log-probabilities are of its tokens too.",
        False,
    )
