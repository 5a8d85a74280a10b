"""`quire chat`: a conversation in the terminal, or line by line through a pipe."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import typer

from quire_client.chats import Message
from quire_client.cli import options as opt
from quire_client.cli.input import read_lines
from quire_client.cli.interruptible import chunks, collected
from quire_client.cli.output import describe_error, print_json, print_resuming, write_text
from quire_client.errors import QuireError
from quire_client.requests import GenerationOptions
from quire_client.results import Generation
from quire_client.sync import Client

_HELP = "/reset starts over, /quit or Ctrl-D leaves, Ctrl-C interrupts an answer"
_LEAVE = "Ctrl-C again or Ctrl-D leaves"


class Conversation:
    """The messages of a chat."""

    def __init__(self, client: Client, system: str | None, options: GenerationOptions) -> None:
        self._client = client
        self._options = options
        self._opening = [Message("system", system)] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Removes all but the system message."""
        self.messages = list(self._opening)

    def ask(self, question: str) -> Iterator[str]:
        """Yields the answer as it comes. An interrupted answer stays in the chat as far as it came.

        Raises QuireError; then the question is removed from the chat, so that it can be repeated.
        """
        asked = [*self.messages, Message("user", question)]
        answer = ""
        try:
            for chunk in chunks(self._client.stream_chat(asked, on_resume=print_resuming, **self._options)):
                answer += chunk.text
                self.messages = [*asked, Message("assistant", answer)]
                yield chunk.text
        except QuireError:
            self.messages = asked[:-1]
            raise

    def ask_whole(self, question: str) -> Generation:
        """The whole answer. Raises QuireError; then the question is not in the chat."""
        asked = [*self.messages, Message("user", question)]
        stream = self._client.stream_chat(asked, on_resume=print_resuming, **self._options)
        answer = collected(stream.collect, self._client)
        self.messages = [*asked, Message("assistant", answer.text)]
        return answer


@opt.with_sampling_options
def chat(
    system: opt.System = None,
    max_tokens: opt.MaxTokens = None,
    stop: opt.Stop = None,
    model: opt.Model = None,
    as_json: opt.Json = False,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
    *,
    sampling: GenerationOptions,
) -> None:
    """Chat with a model: /reset starts over, /quit or Ctrl-D leaves, Ctrl-C interrupts an answer.

    Without a terminal, each line of standard input is a message, or /reset or /quit, and its answer a line or more of
    standard output; with --json it is a line of JSON.
    """
    is_interactive = sys.stdin.isatty()
    if as_json and is_interactive:
        raise typer.BadParameter("needs messages on standard input, one on each line", param_hint="--json")
    wanted: GenerationOptions = {
        **sampling,
        "max_tokens": max_tokens,
        "stop": stop,
        "model": model,
    }
    with Client(address, api_key=api_key, timeout=timeout) as client:
        conversation = Conversation(client, system, wanted)
        if is_interactive:
            served = collected(client.models, client)  # also fails at once without a server
            first = next((one.name for one in served), "")
            run_chat(conversation, model or first)
        else:
            _answer_lines(conversation, as_json=as_json)


def _answer_lines(conversation: Conversation, *, as_json: bool) -> None:
    for line in read_lines():
        match line.strip():
            case "":
                pass
            case "/quit":
                return
            case "/reset":
                conversation.reset()
            case _ if as_json:
                print_json(conversation.ask_whole(line), indent=None)
            case _:
                write_text(conversation.ask(line))


def run_chat(conversation: Conversation, model: str, check: Callable[[], None] = lambda: None) -> None:
    """Reads lines from a terminal and answers them, until the user leaves. `check` is called after each of them."""
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    print(f"{model}: {_HELP}", file=sys.stderr)
    was_interrupted = False  # since the last line that is not empty
    line = None
    while True:
        try:
            while True:
                line = None
                line = _read_line()
                if line is None:
                    return
                if line:
                    was_interrupted = False
                _take(conversation, line)
                check()
        except KeyboardInterrupt:
            print()
            if not line:
                if was_interrupted:
                    return
                was_interrupted = True
                print(_LEAVE, file=sys.stderr)


def _read_line() -> str | None:
    """The next line without white space around it; None: the user leaves."""
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    return None if line == "/quit" else line


def _take(conversation: Conversation, line: str) -> None:
    match line:
        case "":
            pass
        case "/reset":
            conversation.reset()
        case "/help":
            print(_HELP, file=sys.stderr)
        case command if command.startswith("/") and command[1:].isalpha():
            print(f"quire: there is no {command}: {_HELP}", file=sys.stderr)
        case question:
            _answer_in_terminal(conversation, question)


def _answer_in_terminal(conversation: Conversation, question: str) -> None:
    try:
        write_text(conversation.ask(question))
    except QuireError as error:
        print(f"quire: {describe_error(error)}", file=sys.stderr)
