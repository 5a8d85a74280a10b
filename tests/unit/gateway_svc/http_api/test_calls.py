"""What the handlers of every protocol share."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway_svc.call_limits import CallLimits
from gateway_svc.http_api import calls as calls_module
from gateway_svc.http_api.calls import HttpCalls
from gateway_svc.http_api.events import long_json, to_json
from gateway_svc.http_api.undefined_fields import UndefinedFields
from gateway_svc.tenant_threads import TenantThreads


@pytest.mark.parametrize(("num_values", "in_thread"), [(1, False), (8_192, False), (8_193, True)])
def test_large_answers_are_rendered_in_a_thread(
    num_values: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stream of the gateway gets a token while the thread of the event loop renders JSON."""
    rendered_in: list[threading.Thread] = []

    def recorded(render: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def rendered(body: Any) -> bytes:
            rendered_in.append(threading.current_thread())
            return render(body)

        return rendered

    answers: list[bytes] = []

    async def respond(data: bytes, content_type: str) -> None:
        assert content_type == "application/json"
        answers.append(data)

    async def main() -> None:
        threads = TenantThreads(2, "test")
        calls = HttpCalls(cast(Any, None), cast(Any, None), UndefinedFields.WARN, threads, CallLimits.unlimited())
        exchange, call = SimpleNamespace(respond=respond), SimpleNamespace(tenant=SimpleNamespace(name="a"))
        body = {"tokens": [7] * num_values}
        await calls.respond(cast(Any, exchange), cast(Any, call), lambda: body, num_values=num_values)
        threads.close()

    monkeypatch.setattr(calls_module, "to_json", recorded(to_json))
    monkeypatch.setattr(calls_module, "long_json", recorded(long_json))
    asyncio.run(main())
    assert answers == [to_json({"tokens": [7] * num_values})]
    assert [thread is not threading.main_thread() for thread in rendered_in] == [in_thread]
