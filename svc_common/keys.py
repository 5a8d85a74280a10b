"""Names that requests and cached prefixes have inside, derived so that no two tenants can ever share one."""

import hashlib

DEFAULT_TENANT_NAME = "default"
"""Who everyone is where no API keys are asked for."""


def request_key(tenant: str, request_id: str, prompt: int = 0) -> str:
    """The key of a request: SHA-256 over tenant and request_id, as hex.

    One HTTP call may carry several prompts, each a request of its own: those beyond the first add their place.
    """
    parts = [tenant, request_id, *([str(prompt)] if prompt else [])]
    return _digest("quire.request", parts).hex()


def cache_salt(tenant: str) -> bytes:
    """What keeps a tenant's cached prefixes apart from others', 32 bytes."""
    return _digest("quire.cache", [tenant])


def _digest(domain: str, parts: list[str]) -> bytes:
    digest = hashlib.sha256()
    for part in (domain, *parts):
        data = part.encode()
        # Lengths make the encoding unambiguous: ("ab", "c") and ("a", "bc") differ.
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
