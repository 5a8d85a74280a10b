"""Programs of the services, where they are installed beside the client. The client does not import them."""

import importlib.util
import sys
from collections.abc import Sequence

import typer

SERVE = "svc_common.supervisor.serve"
ATTACHED = "svc_common.supervisor.attached"
DOCTOR = "svc_common.doctor"
QUANTIZE = "worker_svc.quantize"
FLAG_LIST = "svc_common.supervisor.flag_list"


def are_installed() -> bool:
    """Whether the services are installed beside the client."""
    return importlib.util.find_spec("svc_common") is not None


def service_command(module: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """The command line of a module, with `flags` of Python. Raises Exit where the services are not installed."""
    if not are_installed():
        step = "in a clone of Quire: pip install --editable '.[local]'"
        print(f"quire: the services are not installed here; {step}", file=sys.stderr)
        raise typer.Exit(1)
    return [sys.executable, *flags, "-m", module, *arguments]
