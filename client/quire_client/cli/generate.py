"""`quire generate`: continues a text."""

import sys
from typing import Annotated

import typer

from quire_client.cli import options as opt
from quire_client.cli.output import print_json, print_resuming, write_text
from quire_client.requests import GenerationOptions
from quire_client.sync import Client


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    n: Annotated[int, typer.Option("--n", help="How many independent texts.")] = 1,
    best_of: opt.BestOf = None,
    beam_width: opt.BeamWidth = None,
    length_penalty: opt.LengthPenalty = None,
    early_stopping: opt.EarlyStopping = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of this many likeliest tokens; with -o json.")
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Your own name for the request, for `quire resume`.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    model: opt.Model = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
) -> None:
    """Continue a text, and write what comes as it comes.

    Where a gateway goes away, the text goes on from another one, or from the same one when it is back.
    """
    if logprobs is not None and output is opt.OutputFormat.TEXT:
        raise typer.BadParameter("log-probabilities are written with -o json only", param_hint="--logprobs")
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    wanted: GenerationOptions = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "n": n,
        "best_of": best_of,
        "beam_width": beam_width,
        "length_penalty": length_penalty,
        "early_stopping": None if early_stopping is None else early_stopping.value_of_option,
        "logprobs": logprobs,
        "request_id": request_id,
        "priority": priority,
        "model": model,
    }
    with Client(address, api_key=api_key, timeout=timeout) as client:
        # What is ranked is known at its end alone, and asked for as a whole.
        is_ranked = any(option is not None for option in (best_of, beam_width, length_penalty, early_stopping))
        if output is opt.OutputFormat.TEXT and n == 1 and not is_ranked:
            write_text(chunk.text for chunk in client.stream(prompt, on_resume=print_resuming, **wanted))
            return
        whole = (
            client.generate(prompt, on_resume=print_resuming, **wanted)
            if is_ranked
            else client.stream(prompt, on_resume=print_resuming, **wanted).collect()
        )
    if output is opt.OutputFormat.JSON:
        print_json(whole)
    elif n == 1:
        write_text([whole.text])
    else:
        for completion in whole.completions:
            write_text([f"[{completion.index}] {completion.text}"])
