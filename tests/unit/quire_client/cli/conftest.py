"""Fixtures of the tests of commands."""

from collections.abc import AsyncIterator

import pytest

from scripted_admin import ScriptedAdmin, scripted_admin


@pytest.fixture
async def admin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedAdmin]:
    """A service at the default address of the command."""
    async with scripted_admin() as (service, address):
        monkeypatch.setenv("QUIRE_ADMIN_ADDRESS", address)
        monkeypatch.setenv("COLUMNS", "160")
        yield service
