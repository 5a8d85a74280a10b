"""The script of `quire completion`, by shtab. Loaded by that command only: older installations have no shtab."""

import json
import subprocess
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, TypeAlias

import shtab
import typer
import typer.core

from quire_client.cli.services import FLAG_LIST, are_installed, service_command

_FILE = "FILE"  # the metavar of values that are paths
_NUM_VALUES = {"one": None, "many": "+"}
_Context: TypeAlias = Any  # Typer has no public name for the contexts that commands make


def completion_script(root: _Context, shell: str) -> str:
    """The script for a shell. `root` is the context of the whole command line."""
    return str(shtab.complete(_parser(root), shell=shell))


def _parser(context: _Context) -> ArgumentParser:
    """The commands of the command line as a parser of argparse, which is what shtab reads."""
    group = context.command
    assert isinstance(group, typer.core.TyperGroup)
    parser = ArgumentParser("quire", add_help=False)
    _add_parameters(parser, context)
    flags_of_services = _flags_of_services()
    commands = parser.add_subparsers()
    for name, command in group.commands.items():
        summary = _escaped((command.help or "").partition("\n")[0])
        subparser = commands.add_parser(name, help=summary, description=summary, add_help=False)
        with command.make_context(name, [], parent=context, resilient_parsing=True) as own:
            _add_parameters(subparser, own)
        if (flags := flags_of_services.get(name)) is not None:
            _add_flags(subparser, flags)
    return parser


def _add_parameters(parser: ArgumentParser, context: _Context) -> None:
    """Adds the options and arguments of a command."""
    for parameter in context.command.get_params(context):
        choices = [item.value for item in parameter.shell_complete(context, "")] or None
        about: dict[str, Any] = {"help": _escaped(getattr(parameter, "help", None) or "")}
        if isinstance(parameter, typer.core.TyperOption):
            about |= {"action": "store_true"} if parameter.is_flag else {"choices": choices}
            added = parser.add_argument(*parameter.opts, *parameter.secondary_opts, **about)
        else:
            nargs = "*" if parameter.nargs == -1 else None
            added = parser.add_argument(parameter.name, choices=choices, nargs=nargs, **about)
        if _FILE in (parameter.metavar, (parameter.name or "").upper()):
            added.complete = shtab.FILE  # type: ignore[attr-defined]


def _flags_of_services() -> Mapping[str, list[dict[str, Any]]]:
    """The flags of commands that start services; none where these are not installed."""
    if not are_installed():
        return {}
    listed = subprocess.run(service_command(FLAG_LIST), stdout=subprocess.PIPE, check=False)
    if listed.returncode:  # it has written an error
        raise typer.Exit(1)
    flags: dict[str, list[dict[str, Any]]] = json.loads(listed.stdout)
    return flags


def _add_flags(parser: ArgumentParser, flags: list[dict[str, Any]]) -> None:
    """Adds MODEL, and flags that the command passes on. Short names are left out: they have several letters."""
    parser.add_argument("MODEL", nargs="?").complete = shtab.FILE  # type: ignore[attr-defined]
    own = {name for action in parser._actions for name in action.option_strings}
    for flag in flags:
        names = [name for name in flag["names"] if name.startswith("--") and name not in own]
        about: dict[str, Any] = {"action": "store_true"}
        if flag["num_values"] != "none":
            about = {"choices": flag["choices"] or None, "nargs": _NUM_VALUES[flag["num_values"]]}
        if names:
            parser.add_argument(*names, help=_escaped(flag["help"]), **about)


def _escaped(text: str) -> str:
    """A text that argparse does not format."""
    return text.replace("%", "%%")
