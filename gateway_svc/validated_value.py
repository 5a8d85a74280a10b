"""A validated request whose result is a value of its prompt: an embedding or a score."""

from dataclasses import dataclass, field
from typing import Protocol

from gateway_svc.field_paths import FieldPath, contract_field_path
from gateway_svc.retention import Retention
from gateway_svc.value_inputs import Vector
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2
from svc_common.errors import QuireError

_SESSION_PROTOCOL = 3  # the oldest whose schedulers pass all parameters on


class ValueParams(Protocol):
    """Which value a prompt gets."""

    def to_proto(self) -> worker_pb2.ResultKind:
        """The kind of result."""

    def check(self, value: Vector, field_path: FieldPath) -> QuireError | None:
        """The error if a value is not what was requested; None: it is."""


@dataclass(frozen=True, slots=True)
class ValidatedValue:
    """One prompt of a call, for the scheduler: as tokens, with values in range."""

    request_id: str
    model: str
    prompt_token_ids: list[int]
    params: ValueParams
    priority: int
    retention: Retention | None
    """None: the scheduler's default."""
    field_path: FieldPath = field(default=contract_field_path, compare=False, repr=False)

    @property
    def session_protocol(self) -> int:
        """The oldest session protocol that has all parts of the request."""
        return _SESSION_PROTOCOL

    def to_proto(self) -> scheduler_pb2.Submit:
        """The Submit, without key, tenant, trace context and deadline."""
        return scheduler_pb2.Submit(
            prompt_token_ids=self.prompt_token_ids,
            n=1,
            priority=self.priority,
            model=self.model,
            result=self.params.to_proto(),
            render_options=scheduler_pb2.RenderOptions(request_id=self.request_id, model=self.model, n=1),
            retention=None if self.retention is None else self.retention.to_proto(),
        )
