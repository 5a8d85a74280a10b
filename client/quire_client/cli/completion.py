"""`quire completion`: a script with which a shell completes commands, flags and their values.

The script has all of them, and starts no program when it is used. Typer's own scripts start Python at each key, for
half a second.
"""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from quire_client.cli import packages


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="The shell that is to read it.")],
) -> None:
    """Print a script that completes commands, flags and values in a shell. Print it again after an upgrade.

    bash: quire completion bash > ~/.local/share/bash-completion/completions/quire

    zsh: quire completion zsh > ~/.zfunc/_quire, with fpath+=~/.zfunc before compinit in ~/.zshrc

    fish: quire completion fish > ~/.config/fish/completions/quire.fish
    """
    try:
        from quire_client.cli.completion_script import completion_script
    except ModuleNotFoundError:
        print(packages.MISSING, file=sys.stderr)
        raise typer.Exit(1) from None
    print(completion_script(context.find_root(), shell.value))
