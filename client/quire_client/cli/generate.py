"""`quire generate`: continues a text."""

from collections.abc import Iterator
from typing import Annotated

import typer

from quire_client.cli import options as opt
from quire_client.cli.input import read_file, read_text
from quire_client.cli.interruptible import chunks, collected
from quire_client.cli.output import print_json, print_resuming, write_text
from quire_client.requests import GenerationOptions
from quire_client.results import Generation
from quire_client.sync import Client, Stream


@opt.with_sampling_options
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    stop: opt.Stop = None,
    stop_token_id: opt.StopTokenId = None,
    ignore_eos: opt.IgnoreEos = False,
    bad_word: opt.BadWord = None,
    logit_bias: opt.LogitBias = None,
    allowed_token_id: opt.AllowedTokenId = None,
    echo: opt.Echo = False,
    truncate_prompt_tokens: opt.TruncatePromptTokens = None,
    truncation_side: opt.TruncationSide = None,
    n: Annotated[int, typer.Option("--n", help="How many independent texts.")] = 1,
    best_of: opt.BestOf = None,
    beam_width: opt.BeamWidth = None,
    length_penalty: opt.LengthPenalty = None,
    early_stopping: opt.EarlyStopping = None,
    json_schema: opt.JsonSchema = None,
    regex: opt.Regex = None,
    choice: opt.Choice = None,
    grammar: opt.Grammar = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of this many top tokens; with --json.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the prompt, which is returned; with --json.")
    ] = None,
    request_id: Annotated[str | None, typer.Option(help="Your own id of the request, for `quire resume`.")] = None,
    priority: opt.Priority = None,
    retention: opt.Retention = None,
    model: opt.Model = None,
    output: opt.Output = opt.OutputFormat.TEXT,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
    *,
    sampling: GenerationOptions,
) -> None:
    """Continue a text, and write it as it is generated.

    If a gateway fails, the stream resumes at another one, or at the same one after its restart.
    """
    for hint, asked in (("--logprobs", logprobs), ("--prompt-logprobs", prompt_logprobs)):
        if asked is not None and output is opt.OutputFormat.TEXT:
            raise typer.BadParameter("log-probabilities are written with --json only", param_hint=hint)
    if sum(one is not None for one in (json_schema, regex, choice or None, grammar)) > 1:
        raise typer.BadParameter(
            "a request has one constraint", param_hint="--json-schema, --regex, --choice, --grammar"
        )
    if prompt == "-":
        prompt = read_text().removesuffix("\n")
    wanted: GenerationOptions = {
        **sampling,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "ignore_eos": ignore_eos,
        "bad_words": bad_word,
        "logit_bias": opt.logit_bias_of(logit_bias),
        "allowed_token_ids": allowed_token_id,
        "echo": echo,
        "truncate_prompt_tokens": truncate_prompt_tokens,
        "truncation_side": None if truncation_side is None else truncation_side.value_of_option,
        "n": n,
        "best_of": best_of,
        "beam_width": beam_width,
        "length_penalty": length_penalty,
        "early_stopping": None if early_stopping is None else early_stopping.value_of_option,
        "json_schema": None if json_schema is None else read_file(json_schema),
        "regex": regex,
        "choice": choice,
        "grammar": None if grammar is None else read_file(grammar),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "request_id": request_id,
        "priority": priority,
        "retention": opt.retention_of(retention),
        "model": model,
    }
    with Client(address, api_key=api_key, timeout=timeout) as client:
        # Ranked sequences are known at the end only, and are not streamed.
        is_ranked = any(option is not None for option in (best_of, beam_width, length_penalty, early_stopping))
        if output is opt.OutputFormat.TEXT and n == 1 and not is_ranked:
            stream = client.stream(prompt, on_resume=print_resuming, **wanted)
            write_text(_pieces(stream, echo=echo))
            return

        def generate() -> Generation:
            if is_ranked:
                return client.generate(prompt, on_resume=print_resuming, **wanted)
            return client.stream(prompt, on_resume=print_resuming, **wanted).collect()

        whole = collected(generate, client)
    if output is opt.OutputFormat.JSON:
        print_json(whole)
        return
    before = whole.prompt.text if echo and whole.prompt else ""
    if n == 1:
        write_text([before + whole.text])
    else:
        for completion in whole.completions:
            write_text([f"[{completion.index}] {before}{completion.text}"])


def _pieces(stream: Stream, *, echo: bool) -> Iterator[str]:
    """The text as it comes, after that of the prompt with `echo`."""
    awaits_prompt = echo
    for chunk in chunks(stream):
        if awaits_prompt and stream.prompt:
            yield stream.prompt.text
            awaits_prompt = False
        yield chunk.text
