"""`quire chat`: a conversation in the terminal, or line by line through a pipe."""

import sys
from collections.abc import Iterator
from contextlib import suppress

from quire_client.chats import Message
from quire_client.cli import options as opt
from quire_client.cli.output import describe_error, print_resuming, write_text
from quire_client.errors import QuireError
from quire_client.requests import GenerationOptions
from quire_client.sync import Client

_HELP = "/reset starts over, /quit or Ctrl-D leaves, Ctrl-C interrupts an answer"


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
            for chunk in self._client.stream_chat(asked, on_resume=print_resuming, **self._options):
                answer += chunk.text
                self.messages = [*asked, Message("assistant", answer)]
                yield chunk.text
        except QuireError:
            self.messages = asked[:-1]
            raise


@opt.with_sampling_options
def chat(
    system: opt.System = None,
    max_tokens: opt.MaxTokens = None,
    stop: opt.Stop = None,
    model: opt.Model = None,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
    *,
    sampling: GenerationOptions,
) -> None:
    """Chat with a model: /reset starts over, /quit or Ctrl-D leaves, Ctrl-C interrupts an answer.

    Without a terminal, each line of standard input is a message and its answer a line or more of standard output.
    """
    wanted: GenerationOptions = {
        **sampling,
        "max_tokens": max_tokens,
        "stop": stop,
        "model": model,
    }
    with Client(address, api_key=api_key, timeout=timeout) as client:
        conversation = Conversation(client, system, wanted)
        if sys.stdin.isatty():
            _run_chat(conversation, client, model)
        else:
            _answer_lines(conversation)


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin:
        if line.strip():
            write_text(conversation.ask(line.rstrip("\n")))


def _run_chat(conversation: Conversation, client: Client, model: str | None) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    first = next((served.name for served in client.models()), "")  # also fails at once without a server
    print(f"{model or first}: {_HELP}", file=sys.stderr)
    while True:
        # Ctrl-C at any place of a turn does not end the chat.
        try:
            if not _take_turn(conversation):
                return
        except KeyboardInterrupt:
            print()


def _take_turn(conversation: Conversation) -> bool:
    """Reads a line and answers or runs it. Returns False where the user leaves."""
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return False
    match line:
        case "":
            pass
        case "/quit":
            return False
        case "/reset":
            conversation.reset()
        case "/help":
            print(_HELP, file=sys.stderr)
        case command if command.startswith("/") and command[1:].isalpha():
            print(f"quire: there is no {command}: {_HELP}", file=sys.stderr)
        case question:
            _answer_in_terminal(conversation, question)
    return True


def _answer_in_terminal(conversation: Conversation, question: str) -> None:
    try:
        write_text(conversation.ask(question))
    except QuireError as error:
        print(f"quire: {describe_error(error)}", file=sys.stderr)
