"""`quire run`: a server on this machine, and a chat with its model, which end together."""

import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

from quire_client.cli import options as opt
from quire_client.cli.chat import Conversation, run_chat
from quire_client.cli.input import read_text
from quire_client.cli.local_server import ReadyServer, ServerProcess
from quire_client.cli.output import print_json, write_text
from quire_client.errors import QuireError
from quire_client.requests import GenerationOptions
from quire_client.sync import Client


@opt.with_long_sampling_options
def run(
    context: typer.Context,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_tokens: opt.MaxTokens = None,
    stop: opt.Stop = None,
    timeout: opt.Timeout = None,
    as_json: opt.Json = False,
    *,
    sampling: GenerationOptions,
) -> None:
    """Start a server on this machine and chat with its model: quire run [MODEL [PROMPT]].

    The answer to a PROMPT, or to all of standard input where that is no terminal, is written, and the command ends.
    Where there are both, PROMPT follows the input. With --json the answer is JSON.

    All other flags are those of quire serve --help. The log of the services is server.log in QUIRE_RUN_DIR.
    """
    if "-h" in context.args:
        print(context.get_help())
        return
    is_terminal = sys.stdin.isatty()
    given = "" if is_terminal else read_text().strip("\n")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
            signal.signal(number, _exit)
    with ServerProcess(context.args) as server:
        prompt = "\n".join(filter(None, (given, server.prompt)))
        is_interactive = is_terminal and not prompt
        _check_prompt(prompt, is_interactive=is_interactive, as_json=as_json)
        ready = server.wait_until_ready()
        if not ready.generates:
            raise typer.BadParameter(f"{ready.model} generates no text: start it by quire serve", param_hint="MODEL")
        wanted: GenerationOptions = {**sampling, "max_tokens": max_tokens, "stop": stop, "model": ready.model}
        with Client(ready.address, api_key=ready.api_key, timeout=timeout) as client:
            server.call_at_end(client.close)  # else an answer would be waited for
            conversation = Conversation(client, system, wanted)
            try:
                if is_interactive:
                    _print_ready(ready)
                    run_chat(conversation, ready.model, server.check)
                elif as_json:
                    print_json(conversation.ask_whole(prompt))
                else:
                    write_text(conversation.ask(prompt))
            except QuireError:
                server.check()
                raise


def _check_prompt(prompt: str, *, is_interactive: bool, as_json: bool) -> None:
    if is_interactive and as_json:
        raise typer.BadParameter("needs a prompt, as an argument or on standard input", param_hint="--json")
    if not is_interactive and not prompt:
        raise typer.BadParameter("standard input is empty, and there is no argument PROMPT", param_hint="PROMPT")


def _print_ready(ready: ReadyServer) -> None:
    where = f"{ready.http} (OpenAI API) and {ready.address} (gRPC)"
    print(f"quire is ready: {ready.model} on {where}; its log is {ready.log}", file=sys.stderr)


def _exit(number: int, _: Any) -> NoReturn:
    """Ends the command and with it the server. The exit status is that of shells for a process that a signal ended."""
    raise SystemExit(128 + number)
