"""Starts everything on this machine by the flags of `vllm serve`: `quire serve MODEL --flag VALUE`.

The flags become QUIRE_… variables, which the services read as under `make run`.
"""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from svc_common.files import why_unreadable
from svc_common.settings import InvalidSettings, name_settings, parse_settings
from svc_common.supervisor.__main__ import run
from svc_common.supervisor.console import Console
from svc_common.supervisor.flag_file import FLAG, split_files
from svc_common.supervisor.planned_roles import check_planned_roles
from svc_common.supervisor.settings import SupervisorSettings
from svc_common.supervisor.vllm_flag_table import FLAGS, SERVED
from svc_common.supervisor.vllm_flags import GIVEN_KEYS, CommandLine, FlagRefused, Value, VllmFlag, read_flags

KEYS_FILE = "serve-api-keys-{}.toml"
"""The name of a file of API keys, with the digest of its contents: another start in the directory, which may also fail,
changes no file that a gateway reads.
"""

_HELP = """usage: quire serve [MODEL] [--flag VALUE ...]

Starts Redis, a worker, a scheduler and a gateway on this machine, and stops them after Ctrl-C. MODEL is a hub id, a
model directory or a GGUF file; without it the default model is served.

Flags of vllm serve that set something here; docs/from-vllm.md has all of them:"""
_OTHER_HELP = "\nQuire's own flags:"


OTHER_FLAGS = tuple(name.replace("_", "-") for name in SupervisorSettings.model_fields)
"""Flags of `make run`, without their dashes. Each has a value."""


def read_arguments(arguments: Sequence[str]) -> CommandLine:
    """What a command line sets. The first of its arguments that are no flags is MODEL. Raises FlagRefused."""
    in_file, others = split_files(arguments)
    of_file = read_flags(in_file, FLAGS, OTHER_FLAGS)
    if of_file.positional:
        raise FlagRefused(f"{FLAG}: {of_file.positional[0]} is the value of no flag: its flag has one value or none")
    line = read_flags(others, FLAGS, OTHER_FLAGS, before=of_file)
    if line.positional:
        line.set("MODEL", {"QUIRE_MODEL": line.positional[0]})
    return line


def read_command(arguments: Sequence[str]) -> CommandLine:
    """What a command line of `quire serve` sets. Raises FlagRefused."""
    line = read_arguments(arguments)
    if len(models := line.positional) > 1:
        raise FlagRefused(f"{models[1]}: there is one MODEL, {models[0]}; several need --models FILE")
    return line


def variables_of(arguments: Sequence[str]) -> dict[str, str]:
    """The variables that a command line of `quire serve` sets. Raises FlagRefused."""
    return read_command(arguments).variables


def checked_settings(line: CommandLine) -> SupervisorSettings:
    """The settings, after `set_variables`. They are also those that each service accepts, as far as it can be known
    before it starts. Raises FlagRefused, which names flags where they have set the values, else variables.
    """
    try:
        settings = parse_settings(SupervisorSettings, [])
        check_planned_roles(settings)
    except InvalidSettings as error:
        names = {variable.removeprefix("QUIRE_").lower(): flag for variable, flag in line.flags.items()}
        raise FlagRefused("; ".join(name_settings(text, names) for text in error.lines)) from None
    return settings


def set_variables(variables: Mapping[str, str]) -> list[str]:
    """Sets them in this process, and writes the file of API keys. Returns the keys. Raises FlagRefused."""
    rest = dict(variables)
    given = rest.pop(GIVEN_KEYS, None)
    keys = [] if given is None else given.split("\n")
    if keys:
        directory = Path(rest.get("QUIRE_RUN_DIR") or os.environ.get("QUIRE_RUN_DIR") or "run")
        rest["QUIRE_API_KEYS"] = str(write_keys(keys, directory))
    os.environ.update(rest)
    return keys


def write_keys(keys: Sequence[str], directory: Path) -> Path:
    """Writes a file of API keys with the digests of these keys, which only its owner may read. Raises FlagRefused."""
    digests = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest() for key in dict.fromkeys(keys)]
    text = "".join(f'[[keys]]\nsha256 = "{digest}"\ntenant = "default"\n\n' for digest in digests)
    path = (directory / KEYS_FILE.format(hashlib.sha256(text.encode()).hexdigest()[:12])).absolute()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise FlagRefused(f"--api-key: {path} cannot be written: {why_unreadable(error)}") from error
    return path


def main() -> None:
    """Exits as the supervisor does, and with 2 where a flag is refused."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(_HELP, *map(_help_line, SERVED), _OTHER_HELP, *map(_help_line, _other_flags()), sep="\n")
        return
    try:
        line = read_command(arguments)
        set_variables(line.variables)
        settings = checked_settings(line)
    except FlagRefused as error:
        print(f"quire serve: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    run(settings, Console())


def _help_line(flag: VllmFlag) -> str:
    return f"  {flag.name:<30} {flag.effect.replace('`', '')}"


def _other_flags() -> list[VllmFlag]:
    """Quire's own flags, which are not of vLLM."""
    fields = SupervisorSettings.model_fields
    known = {flag.name for flag in SERVED}
    own = {f"--{name.replace('_', '-')}": (name, field.description or "") for name, field in fields.items()}
    return [Value(flag, f"QUIRE_{name.upper()}", text) for flag, (name, text) in own.items() if flag not in known]


if __name__ == "__main__":
    main()
