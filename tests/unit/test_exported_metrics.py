"""What the services export follows the conventions of Prometheus."""

from prometheus_client import generate_latest

from exported_metrics import registries
from promtool import promtool


async def test_promtool_finds_nothing_wrong_with_the_metrics() -> None:
    async with registries() as read:
        pages = [generate_latest(registry).decode() for registry in read]
    assert all("# TYPE quire_" in page for page in pages)
    for page in pages:
        promtool("check", "metrics", text=page)
