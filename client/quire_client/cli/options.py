"""Options that several commands share."""

from enum import StrEnum
from typing import Annotated, Final

import typer

from quire_client.connection import DEFAULT_ADDRESS
from quire_client.requests import EarlyStopping as RequestedEarlyStopping


class OutputFormat(StrEnum):
    """How results are written."""

    TEXT = "text"
    JSON = "json"


class EarlyStoppingOption(StrEnum):
    """When a beam search ends, as transformers' early_stopping has it."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"

    @property
    def value_of_option(self) -> RequestedEarlyStopping:
        """The same for a call."""
        return "never" if self is EarlyStoppingOption.NEVER else self is EarlyStoppingOption.TRUE


_RANKING: Final = "Ranking"
_SAMPLING: Final = "Sampling"
_STOPPING: Final = "Stopping"

Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="QUIRE_ADDRESS",
        metavar="HOST:PORT",
        help="Server to call, or several, separated by commas: from one that does not answer on to the next.",
    ),
]
ADDRESS = DEFAULT_ADDRESS
# Not by the environment's name: that key is Quire's own, and not for another server that `quire bench` may call.
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="Key to call with.", show_default="QUIRE_API_KEY")]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Time that one request may take, from its sending to the end of its answer."),
]
Output = Annotated[OutputFormat, typer.Option("--output", "-o", help="Format of the result.")]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Model to use.", show_default="the one that is served"),
]
System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="What the model is told beforehand.")
]

Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="0 (greedy) to 2; 1 unless given.", rich_help_panel=_SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the likeliest tokens up to this probability.", rich_help_panel=_SAMPLING),
]
TopK = Annotated[int | None, typer.Option(help="Keep this many likeliest tokens.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens below this share of the likeliest.", rich_help_panel=_SAMPLING),
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Against tokens that came before.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Against tokens, by how often they came.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Against tokens of prompt and output; 1 is none.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option(help="Makes the draw repeatable.", rich_help_panel=_SAMPLING)]

BestOf = Annotated[
    int | None,
    typer.Option(help="Generate this many and give the likeliest.", show_default="n", rich_help_panel=_RANKING),
]
BeamWidth = Annotated[
    int | None, typer.Option(help="Search with this many beams instead of drawing.", rich_help_panel=_RANKING)
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(help="Of a beam search: above 0 for long texts, below for short ones.", rich_help_panel=_RANKING),
]
EarlyStopping = Annotated[
    EarlyStoppingOption | None, typer.Option(help="When a beam search ends.", rich_help_panel=_RANKING)
]

MaxTokens = Annotated[
    int | None, typer.Option(help="The most tokens.", show_default="what the context leaves", rich_help_panel=_STOPPING)
]
MinTokens = Annotated[int | None, typer.Option(help="The fewest tokens.", rich_help_panel=_STOPPING)]
Stop = Annotated[list[str] | None, typer.Option(help="Text to stop at; may be repeated.", rich_help_panel=_STOPPING)]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on at end-of-text.", rich_help_panel=_STOPPING)]
