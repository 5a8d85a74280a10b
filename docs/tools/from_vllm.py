"""Writes the tables of docs/from-vllm.md: `python -m docs.tools.from_vllm`."""

from pathlib import Path

from docs.tools.sections import with_sections
from gateway_svc.http_api.openai import unsupported_fields
from gateway_svc.http_api.openai.chat_models import ChatBody
from gateway_svc.http_api.openai.generation_body import CompletionBody
from svc_common.supervisor.vllm_flag_table import ACCEPTED, REFUSED, SERVED
from svc_common.supervisor.vllm_flags import VllmFlag

PAGE = Path(__file__).parents[1] / "from-vllm.md"

SAMPLING_PARAMS: dict[str, str] = {
    "n": "over HTTP and gRPC; 1 to 128",
    "presence_penalty": "",
    "frequency_penalty": "",
    "repetition_penalty": "",
    "temperature": "at most 2",
    "top_p": "",
    "top_k": "0 and −1 are all tokens",
    "min_p": "",
    "seed": "any signed 64-bit integer. Another engine samples other tokens with it",
    "stop": "",
    "stop_token_ids": "at most 64",
    "ignore_eos": "",
    "max_tokens": "",
    "min_tokens": "",
    "logprobs": "0 to 20, or up to `--max-logprobs`; −1, the whole vocabulary, is refused",
    "prompt_logprobs": "",
    "prompt_logprob_token_ids": "not a field of vLLM's HTTP API",
    "prompt_logprob_start": "not a field of vLLM's HTTP API",
    "logprob_token_ids": "at most 128",
    "flat_logprobs": "a form of results of vLLM's Python API",
    "detokenize": "text is always sent; answers may have token ids beside it",
    "skip_special_tokens": "",
    "spaces_between_special_tokens": "",
    "include_stop_str_in_output": "",
    "output_kind": "of `AsyncLLM`; over HTTP and gRPC `stream` decides: streams have deltas",
    "stream_interval": "each step's tokens are sent at once",
    "skip_clone": "concerns vLLM's Python API only",
    "output_text_buffer_length": "is vLLM's own: text that may begin a stop string is held back here, too",
    "structured_outputs": "see [constraints](api.md#constraints-on-the-output); not `structural_tag`",
    "logit_bias": "at most 1,024 entries",
    "allowed_token_ids": "at most 16,384",
    "extra_args": "has arguments of vLLM's plugins; over HTTP it is `vllm_xargs`, which is refused unless it is empty",
    "bad_words": "at most 1,024",
    "skip_reading_prefix_cache": "a request cannot leave out the prefix cache",
    "thinking_token_budget": "of chats; of models whose tokenizer has a token for the end of reasoning",
    "repetition_detection": "a pattern that repeats does not end an answer",
    "routed_experts_prompt_start": "experts are not reported",
    "trace_decode_token_ids": "tokens cannot be forced",
    "watermarking": "outputs have no watermark",
}
"""The fields of vLLM's SamplingParams, with what differs here or why it is not served."""

_BODIES = {**CompletionBody.model_fields, **ChatBody.model_fields}
_REFUSED_FIELDS = {*unsupported_fields.COMPLETION, *unsupported_fields.CHAT}


def tables() -> dict[str, str]:
    """The tables by the name of their section."""
    return {"served": _flags(SERVED), "accepted": _flags(ACCEPTED), "refused": _refused(), "sampling": _sampling()}


def page(text: str) -> str:
    """The page with its tables as the code says. Raises ValueError where it lacks the section of a table."""
    return with_sections(text, tables())


def _flags(flags: tuple[VllmFlag, ...]) -> str:
    rows = (f"| {_names(flag)} | {flag.effect} |\n" for flag in flags)
    return "| flag of vLLM | here |\n|---|---|\n" + "".join(rows)


def _refused() -> str:
    by_reason: dict[str, list[str]] = {}
    for flag in REFUSED:
        by_reason.setdefault(flag.instead, []).append(_names(flag))
    rows = (f"| {', '.join(names)} | {instead} |\n" for instead, names in by_reason.items())
    return "| flags of vLLM | instead |\n|---|---|\n" + "".join(rows)


def _names(flag: VllmFlag) -> str:
    return ", ".join(f"`{name}`" for name in (flag.name, *flag.aliases))


def _status(name: str) -> str:
    """Whether bodies may have a field."""
    if name in _BODIES:
        return "yes"
    return "refused" if name in _REFUSED_FIELDS else "no"


def _sampling() -> str:
    rows = (f"| `{name}` | {_status(name)} | {text} |\n" for name, text in SAMPLING_PARAMS.items())
    return "| field | served | |\n|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
