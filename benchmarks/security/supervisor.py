"""The supervisor of `make run`, but its services use mutual TLS.

    python -m benchmarks.security.supervisor FOLDER

FOLDER has the CA's certificate as `ca.crt`, and `ROLE.crt` and `ROLE.key` of each role.
"""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from svc_common.settings import read_settings
from svc_common.supervisor.__main__ import supervise
from svc_common.supervisor.addresses import LOOPBACK, FreePorts
from svc_common.supervisor.console import Console
from svc_common.supervisor.probes import answers_http
from svc_common.supervisor.roles import Role, StartTier
from svc_common.supervisor.settings import SupervisorSettings


def with_certificate(folder: Path, role: Role) -> Role:
    """The role with its certificate. Its probe asks the metrics port, which needs none."""
    environment = {
        **role.environment,
        "QUIRE_INSECURE": "0",
        "QUIRE_MTLS_CERT_FILE": str(folder / f"{role.name}.crt"),
        "QUIRE_MTLS_KEY_FILE": str(folder / f"{role.name}.key"),
        "QUIRE_MTLS_CA_FILE": str(folder / "ca.crt"),
    }
    if role.tier is StartTier.GATEWAY:  # it has no inner port
        return replace(role, environment=environment)
    port = environment[f"QUIRE_{role.name.upper()}_METRICS_PORT"]
    return replace(role, environment=environment, probe=answers_http(f"{LOOPBACK}:{port}", "/live"))


def main() -> None:
    """Of one worker and one scheduler; their names are those of their roles."""
    folder = Path(sys.argv[1])
    with FreePorts() as free_ports:
        settings = read_settings(SupervisorSettings, [])
        asyncio.run(supervise(settings, Console(), free_ports, partial(with_certificate, folder)))


if __name__ == "__main__":
    main()
