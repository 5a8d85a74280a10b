"""A small run of the floods of connections."""

from tests.acceptance.connection_floods import BASE_BYTES, BYTES_PER_CONNECTION, flood


async def test_a_gateway_answers_amid_floods_and_its_memory_has_a_bound() -> None:
    found = await flood(400)
    assert found["most"] <= BASE_BYTES + 400 * BYTES_PER_CONNECTION
