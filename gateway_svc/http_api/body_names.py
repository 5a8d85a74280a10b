"""How JSON bodies spell the fields of a request, where their protocol has no name of its own."""

from collections.abc import Mapping

from gateway_svc.field_paths import Field
from gateway_svc.sampling_fields import SAMPLING_FIELDS

# The objects of the contract's Generation, such as `sampling` and `stopping`, are not in bodies.
BODY_NAMES: Mapping[str, str] = {
    **{which: which.rpartition(".")[2] for which in Field},
    **{one.path: one.name for one in SAMPLING_FIELDS},
    Field.REQUEST_ID: "Idempotency-Key",
}
