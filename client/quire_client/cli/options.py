"""Options that several commands share."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast

import typer

from quire_client.connection import DEFAULT_ADDRESS, timeout_of
from quire_client.http_client import is_http_url
from quire_client.requests import EarlyStopping as RequestedEarlyStopping
from quire_client.requests import Retention as RequestedRetention
from quire_client.requests import TruncationSide as RequestedTruncationSide


class OutputFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class PoolingOption(StrEnum):
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


class TruncationSideOption(StrEnum):
    LEFT = "left"
    RIGHT = "right"

    @property
    def value_of_option(self) -> RequestedTruncationSide:
        """The argument of a call."""
        return "left" if self is TruncationSideOption.LEFT else "right"


class EarlyStoppingOption(StrEnum):
    """When a beam search ends, as early_stopping of transformers."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"

    @property
    def value_of_option(self) -> RequestedEarlyStopping:
        """The argument of a call."""
        return "never" if self is EarlyStoppingOption.NEVER else self is EarlyStoppingOption.TRUE


CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_RANKING: Final = "Ranking"
_SAMPLING: Final = "Sampling"
_STOPPING: Final = "Stopping"


def _sampling(kind: type[int] | type[float], text: str) -> Any:
    return Annotated[kind | None, typer.Option(help=text, rich_help_panel=_SAMPLING)]


Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="QUIRE_ADDRESS",
        metavar="HOST:PORT",
        help="Server address, or several separated by commas: the next one is used where one does not respond.",
    ),
]
ADDRESS = DEFAULT_ADDRESS
# No envvar: QUIRE_API_KEY must not be sent to another server that `quire bench` calls.
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="API key.", show_default="QUIRE_API_KEY")]


def check_timeout(seconds: float | None) -> float | None:
    """A timeout; None for infinity, as there is no limit. Raises BadParameter."""
    try:
        return timeout_of(seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def check_request_timeout(seconds: float | None) -> float | None:
    """The same of one request, which is above 0."""
    if seconds is not None and seconds <= 0:
        raise typer.BadParameter(f"timeout is {seconds:g}: it must be above 0")
    return check_timeout(seconds)


Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Timeout of one request, from its sending to the end of its response; inf: none.",
        callback=check_request_timeout,
    ),
]


def check_url(url: str | None) -> str | None:
    """Raises BadParameter for what no HTTP client can call."""
    if url is not None and not is_http_url(url):
        raise typer.BadParameter("an URL such as http://127.0.0.1:8000 is needed")
    return url


Admin = Annotated[
    str,
    typer.Option(envvar="QUIRE_ADMIN_ADDRESS", metavar="HOST:PORT", help="The scheduler's admin address."),
]
Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Format of the result.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Model to use.", show_default="the first one"),
]
System = Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="System message.")]

_TEMPERATURE: Final = "0 (greedy) to 2; by default as the model's files say, else 1."
_SAMPLING_OPTIONS: Final = {
    "temperature": Annotated[
        float | None,
        typer.Option("--temperature", "-t", help=_TEMPERATURE, rich_help_panel=_SAMPLING),
    ],
    "top_p": _sampling(float, "Keep the top tokens up to this probability mass."),
    "top_k": _sampling(int, "Keep this many top tokens."),
    "min_p": _sampling(float, "Drop tokens below this share of the highest probability."),
    "typical_p": _sampling(float, "Keep the most typical tokens up to this probability mass."),
    "presence_penalty": _sampling(float, "Penalty of tokens that were generated before."),
    "frequency_penalty": _sampling(float, "Penalty of tokens for each time they were generated."),
    "repetition_penalty": _sampling(float, "Divides logits of tokens in prompt and output; 1 is none."),
    "seed": _sampling(int, "Makes sampling repeatable."),
}


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each sampling parameter to a command, which gets their values as one argument, `sampling`."""
    return _with_sampling_options(command, _SAMPLING_OPTIONS)


def with_long_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same without short names, for a command that passes others' flags on: those of vLLM have several letters."""
    return _with_sampling_options(command, _SAMPLING_OPTIONS | {"temperature": _sampling(float, _TEMPERATURE)})


def _with_sampling_options(command: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., None]:
    def collect(values: dict[str, Any]) -> None:
        values["sampling"] = {name: values.pop(name) for name in options}

    return _with_options(command, [_parameter(name, option) for name, option in options.items()], collect, "sampling")


def with_json(command: CommandT) -> CommandT:
    """Adds the option --json to a command with `output`. It is the same as -o json."""

    def collect(values: dict[str, Any]) -> None:
        if values.pop("as_json"):
            values["output"] = OutputFormat.JSON

    return _with_options(command, [_parameter("as_json", Json, default=False)], collect)


def _parameter(name: str, option: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)


def _with_options(
    command: CommandT,
    added: Sequence[inspect.Parameter],
    collect: Callable[[dict[str, Any]], None],
    replaced: str | None = None,
) -> CommandT:
    """Adds options after a command's first one. `collect` turns all values into the command's own arguments, of which
    `replaced` is no option.
    """
    signature = inspect.signature(command)
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [one.replace(kind=kind) for one in signature.parameters.values() if one.name != replaced]
    parameters = [*own[:1], *added, *own[1:]]

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        collect(values)
        return command(**values)

    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
    return cast(CommandT, wrapper)


Retention = Annotated[
    str | None,
    typer.Option(
        metavar="none|until_end|SECONDS",
        help="How long the server's record of the request is kept after its end.",
        show_default="the server's",
    ),
]


def retention_of(text: str | None) -> RequestedRetention | None:
    """The argument of a call. Raises BadParameter."""
    match text:
        case None | "none" | "until_end":
            return text
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter("must be none, until_end or a number of seconds", param_hint="--retention")
    return int(text)


_CONSTRAINT: Final = "Constraint"

JsonSchema = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="The text is JSON that is valid under the JSON Schema in this file.",
        rich_help_panel=_CONSTRAINT,
    ),
]
Regex = Annotated[
    str | None, typer.Option(help="The text matches this regular expression.", rich_help_panel=_CONSTRAINT)
]
Choice = Annotated[
    list[str] | None, typer.Option(help="The text is this one; may be repeated.", rich_help_panel=_CONSTRAINT)
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="The text matches the grammar in this file, in Lark's syntax.",
        rich_help_panel=_CONSTRAINT,
    ),
]

BestOf = Annotated[
    int | None,
    typer.Option(help="Generate this many and return the most probable.", show_default="n", rich_help_panel=_RANKING),
]
BeamWidth = Annotated[
    int | None, typer.Option(help="Beam search of this width instead of sampling.", rich_help_panel=_RANKING)
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(help="Of a beam search: above 0 favours long texts, below 0 short ones.", rich_help_panel=_RANKING),
]
EarlyStopping = Annotated[
    EarlyStoppingOption | None, typer.Option(help="When a beam search ends.", rich_help_panel=_RANKING)
]

MaxTokens = Annotated[
    int | None, typer.Option(help="The most tokens.", show_default="the rest of the context", rich_help_panel=_STOPPING)
]
MinTokens = Annotated[int | None, typer.Option(help="The fewest tokens.", rich_help_panel=_STOPPING)]
Stop = Annotated[list[str] | None, typer.Option(help="Text to stop at; may be repeated.", rich_help_panel=_STOPPING)]
BadWord = Annotated[
    list[str] | None, typer.Option(help="Text that is not generated; may be repeated.", rich_help_panel=_SAMPLING)
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(metavar="ID", help="Token to stop at; may be repeated.", rich_help_panel=_STOPPING),
]
AllowedTokenId = Annotated[
    list[int] | None,
    typer.Option(metavar="ID", help="Only such tokens are sampled; may be repeated.", rich_help_panel=_SAMPLING),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS", help="Is added to the logit of this token; may be repeated.", rich_help_panel=_SAMPLING
    ),
]


def logit_bias_of(entries: list[str] | None) -> dict[int, float] | None:
    """The argument of a call. Raises BadParameter."""
    biases: dict[int, float] = {}
    for entry in entries or ():
        token, _, bias = entry.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"{entry!r} is not a token id and its bias, such as 42=-1.5", param_hint="--logit-bias"
            ) from None
    return biases or None


_PROMPT: Final = "Prompt"

Echo = Annotated[bool, typer.Option("--echo", help="Write the prompt before the text.", rich_help_panel=_PROMPT)]
Priority = Annotated[int | None, typer.Option(help="Higher runs first.")]
TruncatePromptTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Keep N tokens of the prompt; -1: as many as fit.",
        show_default="a prompt that is too long is refused",
        rich_help_panel=_PROMPT,
    ),
]
TruncationSide = Annotated[
    TruncationSideOption | None,
    typer.Option(help="Where that takes tokens away.", show_default="left", rich_help_panel=_PROMPT),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-text.", rich_help_panel=_STOPPING)]
