"""What tests of the Responses API make of a scripted scheduler's requests."""

from typing import Any

from openai.types.responses import Response

from gateway_harness import encoded
from quire.scheduler.v1 import scheduler_pb2 as scheduler_v1
from scripted_scheduler import attached_of, stop_end
from tiny_model import EOS, tiny_tokenizer


def record(submit: scheduler_v1.Submit, text: str, *, is_over: bool = True, **fields: Any) -> scheduler_v1.Record:
    """What the scheduler has of a response that answers with this text."""
    token_ids = encoded(text)
    end = None
    if is_over and not fields:
        token_ids.append(EOS)
        end = stop_end(EOS)
    tokens = scheduler_v1.Tokens(token_ids=token_ids, cached_tokens=0, end=end)
    found = scheduler_v1.Record(attached=attached_of(submit, tokens), attachment=submit.attachment, **fields)
    if is_over:
        found.ended_at.FromSeconds(2_000_000_000)
    return found


def prompt_of(submit: scheduler_v1.Submit) -> str:
    return tiny_tokenizer().decode(submit.prompt_token_ids, skip_special_tokens=False)


async def events_of(stream: Any) -> list[dict[str, Any]]:
    return [event.to_dict() async for event in stream]


def texts_of(response: Response) -> list[str]:
    return [part.text for item in response.output if item.type == "message" for part in item.content]  # type: ignore[union-attr]
