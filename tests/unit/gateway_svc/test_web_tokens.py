"""JSON Web Tokens as credentials."""

import base64
import hmac
import http.server
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from gateway_svc import web_tokens
from gateway_svc.failed_logins import LoginFailure, LoginRefused
from gateway_svc.key_tables import InvalidKeyFile
from gateway_svc.tenant import AccountLimits, Tenant
from gateway_svc.web_tokens import CLOCK_SKEW, MAX_TOKEN_LENGTH, SigningKeys, TokenRules, TokenVerifier
from token_issuer import AUDIENCE, ISSUER, TokenIssuer, public_jwk, rsa_key

NOTHING = Tenant("", limits=AccountLimits(""), max_priority=0)
GOLD = replace(NOTHING, weight=2.0, limits=AccountLimits("", max_running=8))
RULES = TokenRules(ISSUER, AUDIENCE, "jwks.json", "tenant", "plan", {"": NOTHING, "gold": GOLD})


@pytest.fixture(scope="module")
def issuer() -> TokenIssuer:
    return TokenIssuer()


def verifier(directory: Path, issuer: TokenIssuer, rules: TokenRules = RULES, **fields: Any) -> TokenVerifier:
    path = directory / "jwks.json"
    path.write_text(issuer.key_set(**fields))
    return TokenVerifier(rules, SigningKeys(str(path)))


def refusal(verifier: TokenVerifier, token: str) -> tuple[LoginFailure, str]:
    with pytest.raises(LoginRefused) as refused:
        verifier.tenant(token)
    assert token not in str(refused.value)
    return refused.value.failure, refused.value.message


# Tokens.


def test_claims_lead_to_a_tenant_and_the_limits_of_its_profile(tmp_path: Path, issuer: TokenIssuer) -> None:
    accepted = verifier(tmp_path, issuer)
    assert accepted.tenant(issuer.token()) == Tenant("search", 1.0, AccountLimits("search/jwt:"), 0)
    assert accepted.tenant(issuer.token(plan="gold", tenant="chat", aud=["other", AUDIENCE])) == Tenant(
        "chat", 2.0, AccountLimits("chat/jwt:gold", max_running=8), 0
    )


@pytest.mark.parametrize(
    ("claims", "failure", "why"),
    [
        ({"exp": None}, LoginFailure.INVALID_TOKEN, "exp, iss or aud is missing"),
        ({"iss": None}, LoginFailure.INVALID_TOKEN, "exp, iss or aud is missing"),
        ({"aud": None}, LoginFailure.INVALID_TOKEN, "exp, iss or aud is missing"),
        ({"aud": "another"}, LoginFailure.INVALID_TOKEN, "another audience"),
        ({"aud": []}, LoginFailure.INVALID_TOKEN, "exp, iss or aud is missing"),
        ({"iss": ISSUER.rstrip("/")}, LoginFailure.INVALID_TOKEN, "another issuer"),
        ({"exp": time.time() - CLOCK_SKEW - 5}, LoginFailure.EXPIRED, "expired"),
        ({"exp": "soon"}, LoginFailure.INVALID_TOKEN, "malformed"),
        ({"nbf": time.time() + 24 * 3600}, LoginFailure.INVALID_TOKEN, "not valid yet"),
        ({"tenant": None}, LoginFailure.INVALID_TOKEN, "claim tenant is not a name"),
        ({"tenant": ""}, LoginFailure.INVALID_TOKEN, "claim tenant is not a name"),
        ({"tenant": 7}, LoginFailure.INVALID_TOKEN, "claim tenant is not a name"),
        ({"tenant": "t" * 257}, LoginFailure.INVALID_TOKEN, "claim tenant is not a name"),
        ({"tenant": "t\ud800"}, LoginFailure.INVALID_TOKEN, "claim tenant is not a name"),
        ({"plan": "silver"}, LoginFailure.INVALID_TOKEN, "claim plan is not a profile"),
        ({"plan": ["gold"]}, LoginFailure.INVALID_TOKEN, "claim plan is not a profile"),
    ],
    ids=range(16),
)
def test_wrong_claims_are_refused(
    claims: dict[str, Any], failure: LoginFailure, why: str, tmp_path: Path, issuer: TokenIssuer
) -> None:
    reason, message = refusal(verifier(tmp_path, issuer), issuer.token(**claims))
    assert reason is failure
    assert why in message


def test_a_token_that_expired_within_the_skew_of_clocks_is_accepted(tmp_path: Path, issuer: TokenIssuer) -> None:
    assert verifier(tmp_path, issuer).tenant(issuer.token(exp=time.time() - 1)).name == "search"


def test_a_token_has_a_largest_length(tmp_path: Path, issuer: TokenIssuer) -> None:
    """Anyone may send one, and the event loop decodes it: 60 kB took 25 ms."""
    accepted = verifier(tmp_path, issuer)
    rest = MAX_TOKEN_LENGTH - len(issuer.token(more=""))
    assert accepted.tenant(issuer.token(more="m" * (rest * 3 // 4 - 3))).name == "search"
    longer = issuer.token(more="m" * rest)
    assert refusal(accepted, longer)[1] == "the token is not valid: it has more than 16384 characters"


def encoded(**part: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def test_the_algorithm_is_that_of_the_signing_key(tmp_path: Path, issuer: TokenIssuer) -> None:
    """The classic attacks: no signature; the public key as an HMAC secret; another algorithm of the same key."""
    accepted = verifier(tmp_path, issuer)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 60, "tenant": "search"}
    unsigned = f"{encoded(alg='none', kid='first')}.{encoded(**claims)}."
    public = issuer.key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signed = f"{encoded(alg='HS256', kid='first')}.{encoded(**claims)}"
    code = hmac.digest(public, signed.encode(), "sha256")
    as_secret = f"{signed}.{base64.urlsafe_b64encode(code).rstrip(b'=').decode()}"
    for token in (unsigned, as_secret, issuer.token(algorithm="RS512"), issuer.token(algorithm="PS256")):
        reason, message = refusal(accepted, token)
        assert reason is LoginFailure.INVALID_TOKEN
        assert "alg" in message or "signature" in message
    assert verifier(tmp_path, issuer, alg="PS256").tenant(issuer.token(algorithm="PS256")).name == "search"


def test_a_token_of_another_key_is_refused(tmp_path: Path, issuer: TokenIssuer) -> None:
    accepted, stranger = verifier(tmp_path, issuer), TokenIssuer(rsa_key())
    assert refusal(accepted, stranger.token()) == (
        LoginFailure.INVALID_TOKEN,
        "the token is not valid: its signature is wrong",
    )
    assert "signing key is not known" in refusal(accepted, stranger.token({"kid": "second"}))[1]
    head, body, signature = issuer.token().split(".")
    for token in (f"{head}.{body}.", f"{head}.{body}.AAAA", f"{head}.{encoded(tenant='b')}.{signature}", "a.b.c", ".."):
        assert refusal(accepted, token)[0] is LoginFailure.INVALID_TOKEN
    assert refusal(accepted, issuer.token({"crit": ["x"], "x": 1}))[0] is LoginFailure.INVALID_TOKEN


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        (ec.generate_private_key(ec.SECP256R1()), "ES256"),
        (ec.generate_private_key(ec.SECP384R1()), "ES384"),
        (ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
    ],
    ids=["ES256", "ES384", "EdDSA"],
)
def test_keys_without_an_algorithm_have_that_of_their_curve(key: Any, algorithm: str, tmp_path: Path) -> None:
    issuer = TokenIssuer(key, algorithm)
    assert verifier(tmp_path, issuer).tenant(issuer.token()).name == "search"


def test_a_token_may_leave_out_the_id_of_the_only_key(tmp_path: Path, issuer: TokenIssuer) -> None:
    nameless = TokenIssuer(issuer.key, kid=None)
    assert verifier(tmp_path, issuer).tenant(nameless.token()).name == "search"
    (tmp_path / "jwks.json").write_text(issuer.key_set(public_jwk(rsa_key(), "second")))
    of_two = TokenVerifier(RULES, SigningKeys(str(tmp_path / "jwks.json")))
    assert "signing key is not known" in refusal(of_two, nameless.token())[1]


# Key sets.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no JSON object with keys"),
        ("[]", "there is no JSON object with keys"),
        ('{"keys": []}', "there is no public key for one of RS256"),
        ('{"keys": {}}', "there is no public key for one of RS256"),
        ('{"keys": [1, {"kty": "oct", "k": "c2VjcmV0"}]}', "there is no public key for one of RS256"),
        ('{"keys": [{"kty": "RSA"}, {"kty": "X"}]}', "there is no public key for one of RS256"),
        ('{"keys": [{"kty": "RSA", "alg": ["x"]}]}', "there is no public key for one of RS256"),
        ('{"keys": [{"kty": ["RSA"], "use": "sig"}]}', "there is no public key for one of RS256"),
        ("[" * 100_000, "there is no JSON object with keys"),
    ],
    ids=range(9),
)
def test_a_key_set_without_a_usable_key_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(text)
    with pytest.raises(InvalidKeyFile, match=message):
        SigningKeys(str(path))


def test_private_encryption_and_short_keys_are_not_used(tmp_path: Path, issuer: TokenIssuer) -> None:
    path = tmp_path / "jwks.json"
    for text, message in (
        (issuer.key_set(use="enc"), "there is no public key"),
        (TokenIssuer(rsa_key(1024)).key_set(), "RSA needs 2048 bits"),
        (issuer.key_set(d="AQAB"), "is a private key"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidKeyFile, match=message):
            SigningKeys(str(path))
    with pytest.raises(InvalidKeyFile, match="no such file"):
        SigningKeys(str(tmp_path / "nowhere.json"))


def test_a_changed_key_set_is_read_again(tmp_path: Path, issuer: TokenIssuer, caplog: pytest.LogCaptureFixture) -> None:
    accepted, second = verifier(tmp_path, issuer), TokenIssuer(rsa_key(), kid="second")
    path = tmp_path / "jwks.json"
    with caplog.at_level(logging.WARNING, logger="quire.gateway"):
        path.write_text("{")
        accepted.signing_keys.refresh()
        accepted.signing_keys.refresh()
    assert len(caplog.records) == 1
    assert accepted.tenant(issuer.token()).name == "search"
    path.write_text(second.key_set())
    accepted.signing_keys.refresh()
    assert accepted.tenant(second.token()).name == "search"
    assert "signing key is not known" in refusal(accepted, issuer.token())[1]


class KeyServer(http.server.ThreadingHTTPServer):
    """Serves a key set, or a redirect to it."""

    text: str | None = None
    num_calls = 0
    raw: bytes | None = None  # the whole response, instead of a key set
    rest: bytes | None = None  # sent after it every 0.05 s until the client closes the connection


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, KeyServer)
        self.server.num_calls += 1
        if self.server.raw is not None:
            self._send_raw(self.server.raw, self.server.rest)
            return
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "/jwks")
            self.end_headers()
            return
        self.send_response(200 if self.server.text else 503)
        self.end_headers()
        self.wfile.write((self.server.text or "").encode())

    def _send_raw(self, raw: bytes, rest: bytes | None) -> None:
        self.close_connection = True
        self.wfile.write(raw)
        with suppress(ConnectionError):
            while rest is not None:
                time.sleep(0.05)
                self.wfile.write(rest)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def key_server() -> Iterator[tuple[KeyServer, str]]:
    with KeyServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_keys_of_a_url_are_fetched_again_now_and_then(issuer: TokenIssuer) -> None:
    now = 1000.0
    second = TokenIssuer(rsa_key(), kid="second")
    with key_server() as (server, url):
        accepted = TokenVerifier(RULES, SigningKeys(f"{url}/jwks", lambda: now))
        assert "signing key is not known" in refusal(accepted, issuer.token())[1]
        accepted.signing_keys.refresh()
        server.text = issuer.key_set()
        accepted.signing_keys.refresh()
        assert server.num_calls == 1, "not at once again"
        now += web_tokens._MIN_AGE
        accepted.signing_keys.refresh()
        assert accepted.tenant(issuer.token()).name == "search"
        # A new key is fetched when a token needs it, and else after the longest age.
        server.text = second.key_set(public_jwk(issuer.key, "first"))
        now += web_tokens._MIN_AGE
        accepted.signing_keys.refresh()
        assert server.num_calls == 2
        refusal(accepted, second.token())
        accepted.signing_keys.refresh()
        assert accepted.tenant(second.token()).name == "search"
        server.text = None
        now += web_tokens._MAX_AGE
        for _ in range(3):
            accepted.signing_keys.refresh()
        assert server.num_calls == 4
        assert accepted.tenant(second.token()).name == "search", "keys stay while the issuer does not answer"


def test_a_redirect_is_not_followed(issuer: TokenIssuer) -> None:
    with key_server() as (server, url):
        server.text = issuer.key_set()
        keys = SigningKeys(f"{url}/redirect")
        keys.refresh()
        assert (keys.find("first"), server.num_calls) == (None, 1)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "raw",
    [b"", b"zz\r\n\r\n", OK + b"transfer-encoding: chunked\r\n\r\n40\r\n{", OK + b"a" * 70_000, OK + b"\r\n{"],
    ids=["nothing", "status line", "cut chunk", "long header", "cut body"],
)
def test_a_malformed_response_changes_nothing(
    raw: bytes, issuer: TokenIssuer, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    with key_server() as (server, url):
        server.text = issuer.key_set()
        accepted = TokenVerifier(RULES, SigningKeys(f"{url}/jwks", lambda: now))
        accepted.signing_keys.refresh()
        server.raw = raw
        now += web_tokens._MAX_AGE
        with caplog.at_level(logging.WARNING, logger="quire.gateway"):
            accepted.signing_keys.refresh()
        assert [record.getMessage() for record in caplog.records] == [
            "the keys of tokens cannot be read; the earlier ones stay"
        ]
        assert accepted.tenant(issuer.token()).name == "search"


@pytest.mark.parametrize(
    ("begin", "rest"),
    [
        (OK + b"\r\n", b" "),
        (OK + b"transfer-encoding: chunked\r\n\r\n", b"1"),
        (OK + b"a: ", b" "),
        (b"HTTP/1.1 200 ", b" "),
    ],
    ids=["body", "size of a chunk", "header", "status line"],
)
def test_a_response_that_does_not_end_in_time_is_an_error(
    begin: bytes, rest: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web_tokens, "_TIMEOUT", 2.0)
    with key_server() as (server, url):
        server.raw, server.rest = begin, rest
        with caplog.at_level(logging.WARNING, logger="quire.gateway"):
            SigningKeys(f"{url}/jwks").refresh()
        assert "no complete response in 2 seconds" in caplog.records[0].__dict__["why"]
