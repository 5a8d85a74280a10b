"""What the engine runs: one part of a call, with its result."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from gateway_svc.model_catalog import CatalogModel
from gateway_svc.request_group import SubscribedGroup
from gateway_svc.request_manager import RequestManager

OnStart: TypeAlias = Callable[[SubscribedGroup[Any]], None]


class EngineRequest(Protocol):
    """First validated, then computed, both on the engine's loop. Any thread may read it."""

    request_id: str
    was_aborted: bool
    is_done: bool

    @property
    def num_prompts(self) -> int:
        """How many prompts of its call it has."""

    @property
    def max_tokens(self) -> float:
        """How many tokens each of its sequences may have at most, as far as its parameters say; else infinity."""

    @property
    def has_numbered_fields(self) -> bool:
        """Whether the fields of its errors say which prompt of the call they are about."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of all its prompts; known once it is validated."""

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated so far, over all sequences."""

    async def validate(self, manager: RequestManager, model: CatalogModel) -> None:
        """Raises QuireError."""

    async def compute(self, manager: RequestManager, on_start: OnStart, on_progress: Callable[[], None]) -> None:
        """Computes the result. `on_start` is called with what may end it early, `on_progress` when there is more of the
        result. Raises QuireError.
        """
