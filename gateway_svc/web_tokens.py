"""JSON Web Tokens as credentials: the signing keys of an issuer, and the claims that name tenant and profile."""

import json
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from gateway_svc.failed_logins import LoginFailure, LoginRefused
from gateway_svc.key_tables import ALLOWANCE_FIELDS, InvalidKeyFile, Table, is_name, read_allowance
from gateway_svc.tenant import Tenant, account_name
from svc_common.files import FileVersion, file_version_if_any, why_unreadable

logger = logging.getLogger("quire.gateway")

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Algorithms of signing keys: asymmetric ones."""

CLOCK_SKEW = 30.0
"""Seconds by which the clocks of issuer and gateway may differ."""

MAX_TOKEN_LENGTH = 16 * 2**10
"""Characters of a token. One of this length is decoded in about 3 ms."""

_MIN_RSA_BITS = 2048
_MAX_TENANT_LENGTH = 256
_MAX_BYTES = 2**20  # of a key set
_TIMEOUT = 5.0  # seconds for a key set to arrive, and for each read from its connection
_CHUNK_BYTES = 64 * 2**10
_MAX_AGE = 300.0  # seconds after which a key set is fetched again
_MIN_AGE = 10.0  # seconds between two attempts, when keys are missing

_FIELDS = {"issuer", "audience", "jwks", "tenant_claim", "profile_claim", "profiles", *ALLOWANCE_FIELDS}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_MESSAGES: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.InvalidAudienceError, "it is for another audience"),
    (jwt.InvalidIssuerError, "it is of another issuer"),
    (jwt.MissingRequiredClaimError, "exp, iss or aud is missing"),
    (jwt.ImmatureSignatureError, "it is not valid yet"),
    (jwt.InvalidSignatureError, "its signature is wrong"),
    (jwt.InvalidAlgorithmError, "its alg is not that of the signing key"),
)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens are accepted, and what they allow.

    `jwks` is the path or URL of the issuer's key set. `profiles` are what tokens with this value of `profile_claim`
    allow, "" those without the claim; tenant and account are set at each login.
    """

    issuer: str
    audience: str
    jwks: str
    tenant_claim: str
    profile_claim: str | None
    profiles: Mapping[str, Tenant]


def read_token_rules(where: str, values: Any, directory: Path) -> TokenRules:
    """Reads the table `[jwt]`; a path of a key set is relative to `directory`. Raises InvalidKeyFile."""
    table = Table(where, values, _FIELDS)
    profiles = table.values.get("profiles", {})
    profile_claim = table.text("profile_claim") if "profile_claim" in table.values else None
    if not isinstance(profiles, dict) or not all(is_name(name) for name in profiles):
        raise table.invalid("profiles", "is not tables with names of 1 to 64 letters, digits, '.', '_' or '-'")
    if bool(profiles) != (profile_claim is not None):
        raise table.invalid("profiles", "requires profile_claim, and profile_claim requires profiles")
    allowances = {"": read_allowance(table, "", "")}
    for name, fields in profiles.items():
        allowances[name] = read_allowance(Table(f"{where}.profiles.{name}", fields, ALLOWANCE_FIELDS), "", "")
    return TokenRules(
        issuer=table.text("issuer"),
        audience=table.text("audience"),
        jwks=_location(table, directory),
        tenant_claim=table.text("tenant_claim") if "tenant_claim" in table.values else "sub",
        profile_claim=profile_claim,
        profiles=allowances,
    )


def _location(table: Table, directory: Path) -> str:
    location = table.text("jwks")
    if "://" not in location:
        return str(directory / location)
    try:
        url = urlsplit(location)
        is_valid = url.scheme == "https" or (url.scheme == "http" and url.hostname in _LOOPBACK)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise table.invalid("jwks", "is neither a path nor an https:// URL")
    return location


class _InvalidKeySet(Exception):  # noqa: N818
    """The text is for the operator."""


class SigningKeys:
    """The public keys of an issuer, from a file or a URL.

    A file that cannot be used raises InvalidKeyFile at first. A URL is first read by `refresh`, and may not answer:
    until it does, there are no keys.
    """

    def __init__(self, location: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidKeyFile."""
        self._clock = clock
        self._location = location
        self._is_url = "://" in location
        self._keys: list[jwt.PyJWK] = []
        self._lacks_key = False
        self._version: FileVersion | None = None
        self._tried_at = self._read_at = clock() - _MAX_AGE
        if self._is_url:
            return
        try:
            self._version = file_version_if_any(Path(location))
            self._keys = _parse(_read_file(location))
        except _InvalidKeySet as error:
            raise InvalidKeyFile(str(error)) from error

    def find(self, kid: str | None) -> jwt.PyJWK | None:
        """The key of a token; the only one where the token names none. If there is none, they are read again soon."""
        if kid is None:
            return self._keys[0] if len(self._keys) == 1 else None
        found = next((key for key in self._keys if key.key_id == kid), None)
        self._lacks_key |= found is None
        return found

    def refresh(self) -> None:
        """Reads a file that has changed, or a URL now and then. If that fails, it is logged, and the earlier keys stay.

        Blocks while it reads a URL.
        """
        version = None if self._is_url else file_version_if_any(Path(self._location))
        if not (self._is_due() if self._is_url else version != self._version):
            return
        self._tried_at, self._version = self._clock(), version
        try:
            keys = _parse(_fetch(self._location) if self._is_url else _read_file(self._location))
        except _InvalidKeySet as error:
            logger.warning("the keys of tokens cannot be read; the earlier ones stay", extra={"why": str(error)})
            return
        self._read_at = self._tried_at
        self._lacks_key = False
        if [key.key_id for key in keys] != [key.key_id for key in self._keys]:
            logger.info("the keys of tokens were read", extra={"jwks": self._location, "num_keys": len(keys)})
        self._keys = keys

    def _is_due(self) -> bool:
        now = self._clock()
        is_wanted = self._lacks_key or not self._keys or now - self._read_at >= _MAX_AGE
        return is_wanted and now - self._tried_at >= _MIN_AGE


@dataclass(frozen=True, slots=True)
class TokenVerifier:
    """Turns a token into a tenant."""

    rules: TokenRules
    signing_keys: SigningKeys = field(repr=False)

    def tenant(self, token: str) -> Tenant:
        """The tenant of a token, with the limits of its profile. Raises LoginRefused."""
        rules, claims = self.rules, self._claims(token)
        tenant = claims.get(rules.tenant_claim)
        if not isinstance(tenant, str) or not _is_tenant_name(tenant):
            raise _invalid(f"its claim {rules.tenant_claim} is not a name")
        profile = claims.get(rules.profile_claim, "") if rules.profile_claim is not None else ""
        allowance = rules.profiles.get(profile) if isinstance(profile, str) else None
        if allowance is None:
            raise _invalid(f"its claim {rules.profile_claim} is not a profile of this deployment")
        assert allowance.limits is not None
        # Names of keys have no ":", so accounts of tokens differ from those of keys.
        limits = replace(allowance.limits, account=account_name(tenant, f"jwt:{profile}"))
        return replace(allowance, name=tenant, limits=limits)

    def _claims(self, token: str) -> Mapping[str, Any]:
        if len(token) > MAX_TOKEN_LENGTH:
            raise _invalid(f"it has more than {MAX_TOKEN_LENGTH} characters")
        header = token.partition(".")[0]
        try:
            # Without the other parts, which PyJWT would decode here, too.
            key = self.signing_keys.find(jwt.get_unverified_header(f"{header}..").get("kid"))
            if key is None:
                raise _invalid("its signing key is not known")
            return jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],  # of the key: that of the token must be the same
                audience=self.rules.audience,
                issuer=self.rules.issuer,
                leeway=CLOCK_SKEW,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise LoginRefused(LoginFailure.EXPIRED, "the token has expired") from None
        except jwt.PyJWTError as error:
            raise _invalid(next((text for kind, text in _MESSAGES if isinstance(error, kind)), "malformed")) from None


def _is_tenant_name(text: str) -> bool:
    """Whether a claim can name a tenant: JSON may have halves of surrogate pairs, of which no key can be made."""
    return 0 < len(text) <= _MAX_TENANT_LENGTH and not any("\ud800" <= one <= "\udfff" for one in text)


def _invalid(why: str) -> LoginRefused:
    return LoginRefused(LoginFailure.INVALID_TOKEN, f"the token is not valid: {why}")


# Key sets.


def _parse(data: bytes) -> list[jwt.PyJWK]:
    """The keys of a key set that sign with an asymmetric algorithm, at least one."""
    try:
        entries = json.loads(data)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _InvalidKeySet("there is no JSON object with keys") from None
    keys = []
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        if not isinstance(entry, dict) or entry.get("use", "sig") != "sig" or entry.get("kty") == "oct":
            continue
        if "d" in entry:
            raise _InvalidKeySet(f"keys[{index}] is a private key")
        try:
            key = jwt.PyJWK(entry)
        except Exception:  # PyJWT does not check the types of fields
            continue  # malformed, or of a kind that is not supported; others of the set may be usable
        is_short = isinstance(key.key, RSAPublicKey) and key.key.key_size < _MIN_RSA_BITS
        if key.algorithm_name in ALGORITHMS and not is_short:
            keys.append(key)
    if not keys:
        raise _InvalidKeySet(
            f"there is no public key for one of {', '.join(ALGORITHMS)}; RSA needs {_MIN_RSA_BITS} bits"
        )
    return keys


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _InvalidKeySet(f"{path}: {why_unreadable(error)}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it could lead to a URL without TLS."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class _Connection(HTTPConnection):
    """Adds its socket to `sockets`."""

    def __init__(self, host: str, *, sockets: list[socket.socket], **options: Any) -> None:
        super().__init__(host, **options)
        self._sockets = sockets

    def connect(self) -> None:
        super().connect()
        self._sockets.append(self.sock)


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class _TimedHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Connects to a server, and ends the connections after some seconds: urllib itself limits only each read."""

    def __init__(self, seconds: float) -> None:
        urllib.request.HTTPSHandler.__init__(self)
        self.is_late = False
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end_connections)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_Connection, sockets=self._sockets), req)

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_TlsConnection, sockets=self._sockets), req)

    def _end_connections(self) -> None:
        self.is_late = True
        for connected in self._sockets:
            with suppress(OSError):  # it is closed
                # Not the method of a TLS socket, which only the thread that reads may call.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _fetch(url: str) -> bytes:
    data = bytearray()
    with _TimedHandler(_TIMEOUT) as timed:
        try:
            with urllib.request.build_opener(_NoRedirects, timed).open(url, timeout=_TIMEOUT) as response:
                while not timed.is_late and (chunk := response.read1(_CHUNK_BYTES)):
                    data += chunk
                    if len(data) > _MAX_BYTES:
                        raise _InvalidKeySet(f"{url}: more than {_MAX_BYTES} bytes")
        except (OSError, ValueError, HTTPException) as error:
            if not timed.is_late:
                raise _InvalidKeySet(f"{url}: {error or type(error).__name__}") from error
        if timed.is_late:
            raise _InvalidKeySet(f"{url}: no complete response in {_TIMEOUT:g} seconds")
    return bytes(data)
