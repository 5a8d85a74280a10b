"""Names under which clients may reach the HTTP port: against DNS rebinding, where a web page of another site makes its
own name an alias of this address, so that a browser lets the page read what this port answers."""

import ipaddress
import re
from collections.abc import Collection

from gateway_svc.http_api.errors import HttpError, HttpRejection
from svc_common.errors import QuireError, Reason

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")

# The last one is the host's loopback in containers of Docker Desktop.
_LOOPBACK_NAMES = ("localhost", "*.localhost", "host.docker.internal")


class AllowedHosts:
    """Names that a request's Host header may have. Addresses are always allowed: nobody can point them elsewhere."""

    def __init__(self, patterns: Collection[str]) -> None:
        """Takes names, `*.name` for all names below one, and `*` for any."""
        self._any = "*" in patterns
        self._names = {pattern.lower() for pattern in patterns if not pattern.startswith("*")}
        self._suffixes = tuple(pattern[1:].lower() for pattern in patterns if pattern.startswith("*."))

    @classmethod
    def for_listener(cls, address: str | None, patterns: Collection[str]) -> "AllowedHosts":
        """Those of the setting; without it, names of loopback for a listener on loopback, and any name for others.

        `address` is None for a Unix socket, which no web page can reach.
        """
        return cls(patterns or (_LOOPBACK_NAMES if address is not None and _is_loopback(address) else ("*",)))

    def check(self, host: str | None) -> None:
        """Raises QuireError where a Host header is malformed, HttpRejection where it has a name that is not allowed.

        Browsers always send the header.
        """
        if self._any or host is None:
            return
        match = _HOST.fullmatch(host)
        if match is None:
            raise QuireError(Reason.INVALID_FIELD, "must be a name or an address, and a port", field="Host")
        name = (match[1] or match[2]).lower().removesuffix(".")
        if name not in self._names and not name.endswith(self._suffixes) and not _is_address(name):
            message = f"no server is called {name} here; QUIRE_ALLOWED_HOSTS can add the name"
            raise HttpRejection(HttpError(421, "host_not_allowed", message, "Host"))


def _is_loopback(address: str) -> bool:
    return address == "localhost" or (_is_address(address) and ipaddress.ip_address(address).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
