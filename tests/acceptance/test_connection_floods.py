"""A small run of the floods of connections."""

from tests.acceptance.connection_floods import bound_of, flood


async def test_a_gateway_answers_amid_floods_and_its_memory_has_a_bound() -> None:
    found = await flood(400)
    assert found["most"] <= bound_of(400)
    assert found["open"] == 400
    assert found["slowest"] <= 30  # a stop of the gateway takes longer, a busy machine does not
