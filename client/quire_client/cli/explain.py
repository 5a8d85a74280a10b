"""`quire explain`: why a request waits, as text."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from quire_client.admin import (
    DEFAULT_ADMIN_ADDRESS,
    AdminClient,
    Explanation,
    PreemptionMethod,
    RequestList,
    SequenceExplanation,
    SequenceState,
)
from quire_client.cli import options as opt
from quire_client.cli.output import admin_error, print_json
from quire_client.errors import QuireError

_SHORT_KEY = 12
_MAX_PROMPTS = 1_024  # of one HTTP call
_NUM_LISTED = 20
_FAIR = "fair"  # the policy with debts of tenants


def explain(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Its request_id, or the id in its response: x-quire-request-id, or x-request-id where there is none.",
            show_default="lists the live requests",
        ),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tenant of the request.", show_default="default; of a list: all")
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=0, max=_MAX_PROMPTS - 1, help="Index of the prompt in an HTTP call with several.", show_default="0"
        ),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Its key from the list, instead of its id.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=1_000, help="The most requests to list.", show_default=str(_NUM_LISTED))
    ] = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = 10.0,
    admin: opt.Admin = DEFAULT_ADMIN_ADDRESS,
) -> None:
    """Explain why a request waits, which blocks it has, and when it is predicted to run."""
    _reject_ignored_options(request, key, tenant, prompt, limit)
    response: Explanation | RequestList
    try:
        with AdminClient(admin, timeout=timeout) as client:
            if key is not None:
                response = client.explain_key(key)
            elif request is not None:
                response = client.explain(request, tenant=tenant, prompt=prompt or 0)
            else:
                response = client.requests(tenant=tenant, limit=_NUM_LISTED if limit is None else limit)
    except QuireError as error:
        raise admin_error(error, admin) from error
    if output is opt.OutputFormat.JSON:
        print_json(response)
    elif isinstance(response, RequestList):
        _print_list(response)
    else:
        print("\n".join(_lines(response)))


def _reject_ignored_options(
    request: str | None, key: str | None, tenant: str | None, prompt: int | None, limit: int | None
) -> None:
    if key is not None:
        if request is not None:
            raise typer.BadParameter("give a request id or a key, not both", param_hint="--key")
        for option, value in (("--tenant", tenant), ("--prompt", prompt)):
            if value is not None:
                raise typer.BadParameter("goes with a request id; a key needs no more", param_hint=option)
    elif request is None and prompt is not None:
        raise typer.BadParameter("goes with a request id", param_hint="--prompt")
    if limit is not None and (request is not None or key is not None):
        raise typer.BadParameter("goes with a list, not with one request", param_hint="--limit")


def _print_list(response: RequestList) -> None:
    table = Table(box=None)
    for name in ("state", "age", "class", "prompt", "generated"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    table.add_column("model", overflow="fold")
    table.add_column("tenant", overflow="fold")
    table.add_column("key", overflow="fold")
    for one in response.requests:
        tokens = (f"{one.num_prompt_tokens:,}", f"{one.num_generated_tokens:,}")
        table.add_row(one.state, _time(one.age), str(one.priority), *tokens, one.model, one.tenant, one.key)
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"{len(response.requests)} of {response.num_live:,} live requests, the oldest")
    for short in response.workers_short_of_memory:
        console.print(f"Memory is short at worker {short.worker} of {short.model}: {short.pressure}")
    for apart in response.workers_set_apart:
        console.print(f"Worker {apart.worker} is not used: {apart.why}")


def _lines(response: Explanation) -> Iterator[str]:
    several = len(response.sequences) > 1
    for sequence in response.sequences:
        sentence = _sentence(sequence)
        yield f"[{sequence.index}] {sentence}" if several else sentence[0].upper() + sentence[1:]
        for name, fact in _facts(sequence):
            yield f"  {name:<12} {fact}"
    came = f"arrived {_time(response.age)} ago"
    if response.time_left is not None:
        came += f", and has {_time(max(response.time_left, 0.0))} until its deadline"
    counted = (
        f", counts as {response.effective_priority} now" if response.effective_priority != response.priority else ""
    )
    yield f"The request {came}; {response.num_prompt_tokens:,} tokens of prompt, at most {response.max_tokens:,} more."
    if response.model:
        yield f"  {'model':<12} {response.model}"
    yield f"  {'class':<12} {response.priority}{counted}"
    served = ""
    if response.policy == _FAIR:
        served = f", {response.tenant_debt:,.0f} tokens ahead of the least served one that waits, or waited last"
    yield f"  {'tenant':<12} {response.tenant}{served}"
    yield f"  {'queue':<12} {_pluralize(response.num_waiting, 'request')} waiting, policy {response.policy}"
    for short in response.workers_short_of_memory:
        yield f"  {'memory':<12} short at worker {short.worker}: {short.pressure}"
    yield f"  {'key':<12} {response.key}"


def _sentence(sequence: SequenceExplanation) -> str:
    match sequence.state:
        case SequenceState.QUEUED:
            return f"waits for its turn{_position(sequence)}"
        case SequenceState.HELD_BACK:
            return f"waits for room within the limits of its API key{_position(sequence)}"
        case SequenceState.WAITING_FOR_PREFIX:
            other = f"request {sequence.awaits_key[:_SHORT_KEY]}" if sequence.awaits_key else "another request"
            return f"waits while {other} computes the prefix of its prompt"
        case SequenceState.SWAPPING_IN:
            return "waits for its blocks, which are being swapped in from host memory"
        case SequenceState.RUNNING:
            return "runs"
        case SequenceState.PAUSED:
            return "pauses until its gateway has searched its text for stop strings"
        case SequenceState.WAITING_FOR_TOKENS:
            return "waits for the key's token budget: its tokens_per_minute are used up"
        case SequenceState.SWAPPED:
            where = "in host memory" if sequence.num_host_blocks else "on its worker's device"
            return f"was preempted, and waits with its blocks {where}{_position(sequence)}"
        case SequenceState.PREEMPTED:
            return f"was preempted, and waits to recompute its tokens{_position(sequence)}"
        case SequenceState.ENDED:
            return "has ended"
    return "is in a state that this version of the client does not know"


def _position(sequence: SequenceExplanation) -> str:
    if sequence.num_ahead is None:
        return ""
    if sequence.num_ahead == 0:
        return ", which is next" if not sequence.num_missing_blocks else "; it is next, once there are blocks"
    return f", behind {_pluralize(sequence.num_ahead, 'sequence')}"


def _facts(sequence: SequenceExplanation) -> Iterator[tuple[str, str]]:
    if sequence.state is SequenceState.ENDED:
        yield "tokens", f"{sequence.num_generated_tokens:,} generated"
        return
    if sequence.predicted_start is not None:
        yield "starts", f"in about {_time(sequence.predicted_start)}, as predicted"
    yield (
        "tokens",
        f"{sequence.num_computed_tokens:,} of {sequence.num_known_tokens:,} computed, "
        f"{sequence.num_generated_tokens:,} generated",
    )
    missing = f", {sequence.num_missing_blocks:,} missing" if sequence.num_missing_blocks else ""
    yield "blocks", f"{sequence.num_device_blocks:,} on the device, {sequence.num_host_blocks:,} on the host{missing}"
    if sequence.num_preemptions:
        yield "preempted", f"{_pluralize(sequence.num_preemptions, 'time')}{_choice(sequence)}"


def _choice(sequence: SequenceExplanation) -> str:
    last = sequence.last_preemption
    if last is None or last.choice is PreemptionMethod.OTHER:
        return ""
    swap, recompute = _time(last.swap_seconds), _time(last.recompute_seconds)
    if last.choice is PreemptionMethod.SWAP:
        return f", the last by swap: {swap} by estimate, recompute {recompute}"
    if last.choice is PreemptionMethod.KEEP:
        return ", the last for another tenant or a higher priority: its blocks stayed on the device"
    return f", the last by recompute: {recompute} by estimate, swap {swap}"


def _pluralize(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _time(seconds: float) -> str:
    """A length of time, to two or three digits."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.1f} h"
