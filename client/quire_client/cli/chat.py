"""`quire chat`: a conversation in the terminal, or line by line through a pipe."""

import sys
from collections.abc import Iterator
from contextlib import suppress

from quire_client.cli import options as opt
from quire_client.cli.output import describe_error, print_resuming, write_text
from quire_client.errors import QuireError
from quire_client.requests import GenerationOptions, Message
from quire_client.sync import Client

_HELP = "/reset starts over, /quit or Ctrl-D leaves, Ctrl-C interrupts an answer"


class Conversation:
    """Messages so far, and how to get the next answer."""

    def __init__(self, client: Client, system: str | None, options: GenerationOptions) -> None:
        self._client = client
        self._options = options
        self._opening = [Message("system", system)] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = list(self._opening)

    def ask(self, question: str) -> Iterator[str]:
        """Yields the answer as it comes. What was given out of it is remembered, also where it is interrupted.

        Raises QuireError; then the question is forgotten, so that it can be asked again.
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


def chat(
    system: opt.System = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = None,
    max_tokens: opt.MaxTokens = None,
    stop: opt.Stop = None,
    model: opt.Model = None,
    timeout: opt.Timeout = None,
    address: opt.Address = opt.ADDRESS,
    api_key: opt.ApiKey = None,
) -> None:
    """Chat with a model: /reset starts over, /quit or Ctrl-D leaves, Ctrl-C interrupts an answer.

    Without a terminal, each line of standard input is a message and its answer a line or more of standard output.
    """
    wanted: GenerationOptions = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
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
    served = ", ".join(model.name for model in client.models())  # also tells at once where no server is
    print(f"{model or served}: {_HELP}", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        match line:
            case "":
                continue
            case "/quit":
                return
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
    except KeyboardInterrupt:
        print()
    except QuireError as error:
        print(f"quire: {describe_error(error)}", file=sys.stderr)
