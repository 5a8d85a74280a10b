"""Keys of requests and salts of cached prefixes, derived so that no two tenants can share one."""

import hashlib

DEFAULT_TENANT_NAME = "default"
"""The tenant of all clients where no API keys are required."""


def request_key(tenant: str, request_id: str, prompt: int = 0) -> str:
    """The key of a request: SHA-256 over tenant and request_id, as hex.

    One HTTP call may have several prompts, each a request: those after the first add their index.
    """
    parts = [tenant, request_id, *([str(prompt)] if prompt else [])]
    return _digest("quire.request", parts).hex()


def cache_salt(tenant: str, of_client: str = "") -> bytes:
    """The salt of a tenant's prefix hashes, 32 bytes: one for each text that its clients choose."""
    return _digest("quire.cache", [tenant, *([of_client] if of_client else [])])


def _digest(domain: str, parts: list[str]) -> bytes:
    digest = hashlib.sha256()
    for part in (domain, *parts):
        data = part.encode()
        # Lengths make the encoding unambiguous: ("ab", "c") and ("a", "bc") differ.
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
