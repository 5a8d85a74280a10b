"""Files of flags, as `vllm serve --config FILE` reads them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from svc_common.supervisor.vllm_flags import FlagRefused

FLAG = "--config"


def split_files(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the file that `--config FILE` names, if it is there, and the others of a command line. Raises
    FlagRefused.
    """
    pending, others, paths = list(arguments), [], []
    while pending:
        name, equals, value = (argument := pending.pop(0)).partition("=")
        if name != FLAG:
            others.append(argument)
        elif equals or pending:
            paths.append(value if equals else pending.pop(0))
        else:
            raise FlagRefused(f"{FLAG} needs a value")
    if len(paths) > 1:
        raise FlagRefused(f"{FLAG}: there is one file, not {len(paths)}")
    return list(_arguments(Path(paths[0]))) if paths else [], others


def _arguments(path: Path) -> Iterator[str]:
    import yaml  # services that do not start others run without it

    try:
        flags = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: also a day that there is not
        raise FlagRefused(f"{FLAG}: {path} cannot be read: {error}") from None
    if not isinstance(flags, dict):
        raise FlagRefused(f"{FLAG}: {path} must have flags without dashes, such as max-model-len: 4096")
    for key, value in flags.items():
        where = f"{FLAG}: {path}: {key}"
        match value:
            case True:
                yield f"--{key}"
            case False:  # as in vLLM, a switch that is false is as one that is not there
                pass
            case list():
                yield from (f"--{key}", *(_text(where, one) for one in value))
            case _:
                yield f"--{key}={_text(where, value)}"


def _text(where: str, value: Any) -> str:
    match value:
        case dict():
            try:
                return json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise FlagRefused(f"{where} cannot be written as JSON: {error}") from None
        case str() | int() | float() if not isinstance(value, bool):
            return str(value)
    raise FlagRefused(f"{where} must be a text, a number, true, false, an object or a list of these, not {value!r}")
