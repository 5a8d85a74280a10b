"""The commands and their errors: each is one line on stderr and an exit code."""

import platform
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import grpc
import typer

from quire_client.batch.lines import BatchError
from quire_client.bench.mix import MixError
from quire_client.bench.targets import TargetError
from quire_client.cli import options as opt
from quire_client.cli.batch import batch
from quire_client.cli.bench import bench
from quire_client.cli.chat import chat
from quire_client.cli.classify import classify
from quire_client.cli.completion import completion
from quire_client.cli.doctor import doctor
from quire_client.cli.embed import embed
from quire_client.cli.explain import explain
from quire_client.cli.generate import generate
from quire_client.cli.help_text import QuireCommand, QuireGroup
from quire_client.cli.local_server import ServerEnded
from quire_client.cli.models import models
from quire_client.cli.offline import OfflineError
from quire_client.cli.output import describe_error
from quire_client.cli.quantize import quantize
from quire_client.cli.resume import resume
from quire_client.cli.run import run as run_model
from quire_client.cli.serve import serve
from quire_client.cli.workers import profile, reset_prefix_cache
from quire_client.connection import __version__
from quire_client.errors import QuireError

app = typer.Typer(
    name="quire",
    cls=QuireGroup,
    help="Use and measure a Quire server.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_command = partial(app.command, cls=QuireCommand)
_PASSES_FLAGS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
# Not -h: flags that are passed on may have several letters after one dash, and -dph would be read as -d, -p and -h.
_command(
    options_metavar="[OPTIONS] [MODEL [PROMPT]]",
    context_settings=_PASSES_FLAGS_ON | {"help_option_names": ["--help"]},
)(run_model)
_command(add_help_option=False, context_settings=_PASSES_FLAGS_ON)(serve)
_command()(opt.with_json(generate))
_command()(chat)
_command()(opt.with_json(embed))
_command()(opt.with_json(classify))
_command()(opt.with_json(resume))
_command()(opt.with_json(models))
_command()(batch)
_command()(opt.with_json(bench))
_command()(opt.with_json(explain))
_command()(opt.with_json(reset_prefix_cache))
_command()(opt.with_json(profile))
_command(add_help_option=False, context_settings=_PASSES_FLAGS_ON)(doctor)
_command()(quantize)
_command()(completion)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quire {__version__} (Python {platform.python_version()}, grpcio {grpc.__version__})")
        raise typer.Exit


@app.callback()
def quire(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Use and measure a Quire server."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def run(args: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the process's own, writes out what it printed, and returns its exit code."""
    try:
        code = app(args=args, prog_name="quire", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = "quire" if context is None else context.command_path
        message = error.format_message().replace("Value error, ", "", 1)  # pydantic's word before a text of typer's
        return _fail(f"{message} ({command} --help lists what there is)", error.exit_code)
    except QuireError as error:
        return _fail(describe_error(error))
    except MixError as error:
        return _fail(str(error), 2)
    except (BatchError, OfflineError, ServerEnded, TargetError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        return 1
    except OSError as error:  # such as a full disk
        return _fail(": ".join(map(str, filter(None, (error.filename, error.strerror)))) or str(error))
    return code if isinstance(code, int) else 0


def _fail(line: str, code: int = 1) -> int:
    print(f"quire: {' '.join(line.split())}", file=sys.stderr)
    return code
