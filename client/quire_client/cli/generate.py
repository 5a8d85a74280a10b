"""`quire generate`: continues a text."""

from typing import Annotated

import typer

from quire_client.cli import options as opt
from quire_client.cli.input import read_text
from quire_client.cli.interruptible import chunks, collected
from quire_client.cli.output import print_json, print_resuming, write_text
from quire_client.requests import GenerationOptions
from quire_client.results import Generation
from quire_client.sync import Client


@opt.with_sampling_options
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    bad_word: opt.BadWord = None,
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
    priority: Annotated[int | None, typer.Option(help="Higher runs first.")] = None,
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
        "ignore_eos": ignore_eos,
        "bad_words": bad_word,
        "n": n,
        "best_of": best_of,
        "beam_width": beam_width,
        "length_penalty": length_penalty,
        "early_stopping": None if early_stopping is None else early_stopping.value_of_option,
        "json_schema": None if json_schema is None else json_schema.read_text(),
        "regex": regex,
        "choice": choice,
        "grammar": None if grammar is None else grammar.read_text(),
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
            write_text(chunk.text for chunk in chunks(stream))
            return

        def generate() -> Generation:
            if is_ranked:
                return client.generate(prompt, on_resume=print_resuming, **wanted)
            return client.stream(prompt, on_resume=print_resuming, **wanted).collect()

        whole = collected(generate, client)
    if output is opt.OutputFormat.JSON:
        print_json(whole)
    elif n == 1:
        write_text([whole.text])
    else:
        for completion in whole.completions:
            write_text([f"[{completion.index}] {completion.text}"])
