"""Reports what is wrong with an installation and its settings, and what to do: `python -m svc_common.doctor --help`.

`quire doctor` runs this and shows its report. This file itself needs the standard library only, since packages may be
what is wrong.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from svc_common.doctor.findings import Finding, Status
from svc_common.doctor.groups import ROLES, installed_roles, run_groups

_HELP = """usage: quire doctor [MODEL] [--role ROLE ...] [--json] [flags of quire serve]

Checks this installation and its settings without changing anything: packages, settings, C++ compiler, GPU, model
files, memory, Redis, ports, certificates, key files. The variables QUIRE_… are those of `make run`; MODEL and flags
are those of `quire serve`.

  --role ROLE  check one service that is started by itself: gateway, scheduler or worker; may be repeated. Without it,
               what `make run` starts; in an image of one service, that service
  --json       print the findings as JSON

Exits with 0 if nothing is wrong (warnings may remain), with 1 if something is, with 2 for a flag that is not known.
"""


class UsageError(Exception):
    """A command line that cannot be used. The text says why."""


@dataclass(frozen=True)
class DoctorOptions:
    """The command line. `rest` are MODEL and flags of `quire serve`."""

    roles: tuple[str, ...]
    as_json: bool
    rest: tuple[str, ...]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "DoctorOptions":
        """Raises UsageError."""
        roles: list[str] = []
        rest: list[str] = []
        pending = list(arguments)
        while pending:
            argument = pending.pop(0)
            name, equals, value = argument.partition("=")
            if name == "--role":
                if not equals:
                    value = pending.pop(0) if pending else ""
                if value not in ROLES:
                    raise UsageError(f"--role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {value or 'empty'}")
                roles.append(value)
            elif argument != "--json":
                rest.append(argument)
        return cls(tuple(dict.fromkeys(roles)), "--json" in arguments, tuple(rest))

    def variables(self) -> dict[str, str]:
        """The variables that MODEL and flags set. Raises UsageError."""
        if not self.rest:
            return {}
        if len(self.rest) == 1 and not self.rest[0].startswith("-"):
            return {"QUIRE_MODEL": self.rest[0]}
        try:
            from svc_common.supervisor.serve import variables_of
            from svc_common.supervisor.vllm_flags import GIVEN_KEYS, FlagRefused
        except Exception as error:  # whatever a broken package raises
            raise UsageError(f"flags cannot be read here ({error}): set the QUIRE_ variables instead") from None
        try:
            variables = variables_of(self.rest)
        except FlagRefused as error:
            raise UsageError(str(error)) from None
        variables.pop(GIVEN_KEYS, None)  # `quire serve` writes a file of them
        return variables


def find(options: DoctorOptions) -> list[Finding]:
    """The findings of all checks. Raises UsageError."""
    environment = os.environ | options.variables()
    here = installed_roles()
    roles = options.roles or here
    if missing := [role for role in roles if role not in here]:
        raise UsageError(f"the {missing[0]} is not installed here; there is {', '.join(here) or 'no service'}")
    by_supervisor = not options.roles and here == ROLES
    names = ["installation", *(["make run"] if by_supervisor else []), *roles]
    return list(run_groups(names, roles, environment, by_supervisor=by_supervisor))


def summary(findings: Sequence[Finding]) -> str:
    """The number of findings of each kind."""
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count or status is Status.WRONG)


def line_of(finding: Finding) -> str:
    """A finding as one line of text."""
    what = ": ".join(filter(None, (finding.found, finding.problem)))
    step = f" → {finding.next_step}" if finding.next_step else ""
    return " ".join(f"{finding.status:<8} {finding.role}: {finding.check}: {what}{step}".split("\n"))


def main() -> None:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(_HELP, end="")
        return
    try:
        options = DoctorOptions.parse(arguments)
        findings = find(options)
    except UsageError as error:
        print(f"quire doctor: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        os._exit(130)  # does not wait for the groups, whose processes end at their next line
    is_ok = all(finding.status is not Status.WRONG for finding in findings)
    if options.as_json:
        print(
            json.dumps({"ok": is_ok, "findings": [each.to_json() for each in findings]}, indent=2, ensure_ascii=False)
        )
    else:
        print(*map(line_of, findings), summary(findings), sep="\n")
    raise SystemExit(not is_ok)


if __name__ == "__main__":
    main()
