"""Writes the flags of commands that start services as JSON: `python -m svc_common.supervisor.flag_list`.

`quire completion` reads them: the client, which has those commands, does not import the services.
"""

import json
from collections.abc import Iterator
from typing import Any

from svc_common.doctor.groups import ROLES
from svc_common.supervisor.serve import OTHER_FLAGS
from svc_common.supervisor.settings import SupervisorSettings
from svc_common.supervisor.vllm_flag_table import ACCEPTED, SERVED

_OF_DOCTOR = (
    {"names": ("--role",), "help": "check one service", "num_values": "one", "choices": ROLES},
    {"names": ("--json",), "help": "print the findings as JSON", "num_values": "none", "choices": ()},
)


def flags_by_command() -> dict[str, list[dict[str, Any]]]:
    """The flags of each command, with `names`, `help`, `num_values` ("none", "one", "many") and `choices`."""
    common = list(_common_flags())
    return {"run": common, "serve": common, "doctor": [*_OF_DOCTOR, *common]}


def _common_flags() -> Iterator[dict[str, Any]]:
    """The flags that are served."""
    listed = set[str]()
    for flag in (*SERVED, *ACCEPTED):
        names = (flag.name, *flag.aliases)
        listed.update(names)
        effect = flag.effect.replace("`", "")
        yield {"names": names, "help": effect, "num_values": flag.num_values, "choices": flag.choices}
    for name in OTHER_FLAGS:
        if f"--{name}" not in listed:
            text = SupervisorSettings.model_fields[name.replace("-", "_")].description
            yield {"names": (f"--{name}",), "help": text, "num_values": "one", "choices": ()}


if __name__ == "__main__":
    print(json.dumps(flags_by_command()))
