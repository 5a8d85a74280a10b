"""An issuer of JSON Web Tokens, with its keys."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER, AUDIENCE = "https://login.example.com/", "quire"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


def public_jwk(key: PrivateKey, kid: str | None = None, **fields: Any) -> dict[str, Any]:
    """A public key as an entry of a key set."""
    if isinstance(key, rsa.RSAPrivateKey):
        jwk = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    elif isinstance(key, ec.EllipticCurvePrivateKey):
        jwk = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        jwk = jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    jwk.pop("key_ops", None)
    return {**jwk, **({} if kid is None else {"kid": kid}), **fields}


@dataclass
class TokenIssuer:
    """Signs tokens with a key whose id is `kid`."""

    key: PrivateKey = field(default_factory=rsa_key)
    algorithm: str = "RS256"
    kid: str | None = "first"

    def key_set(self, *others: dict[str, Any], **fields: Any) -> str:
        """The key set as JSON."""
        return json.dumps({"keys": [*others, public_jwk(self.key, self.kid, **fields)]})

    def token(self, header: dict[str, Any] | None = None, algorithm: str | None = None, **claims: Any) -> str:
        """A token for tenant `search` that is valid for a minute, with other claims; a claim of None is left out."""
        known = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 60, "tenant": "search"}
        headers = {**({} if self.kid is None else {"kid": self.kid}), **(header or {})}
        payload = {name: value for name, value in (known | claims).items() if value is not None}
        return jwt.encode(payload, self.key, algorithm or self.algorithm, headers)
