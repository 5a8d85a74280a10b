"""`quire quantize`: writes a model in fewer bits, where the services are installed beside the client."""

import subprocess
from enum import StrEnum
from typing import Annotated

import typer

from quire_client.cli import options as opt
from quire_client.cli.services import QUANTIZE, service_command


class WeightFormatName(StrEnum):
    """Bits of weights and of activations."""

    W8A8 = "w8a8"
    W8A16 = "w8a16"
    W4A16 = "w4a16"


class GroupSize(StrEnum):
    """Inputs with one scale."""

    OF_32 = "32"
    OF_64 = "64"
    OF_128 = "128"


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="model directory, GGUF file or hub id; '' is the default model")
    ],
    out: Annotated[str, typer.Argument(help="directory to write; it must not exist, or be empty", metavar="OUT")],
    format_name: Annotated[WeightFormatName, typer.Option("--format", help="bits of weights and of activations")],
    group_size: Annotated[GroupSize, typer.Option(help="w4a16: inputs with one scale")] = GroupSize.OF_32,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of the model's hub id")] = None,
    as_json: opt.Json = False,
) -> int:
    """Write a model with its weights in fewer bits, as compressed-tensors stores them."""
    flags = [f"--format={format_name.value}", f"--group-size={group_size.value}"]
    if revision is not None:
        flags.append(f"--revision={revision}")
    if as_json:
        flags.append("--json")
    return subprocess.run(service_command(QUANTIZE, *flags, "--", model, out), check=False).returncode
