"""Logit filters, one per module: `FILTER` of each."""

import pkgutil
from importlib import import_module

from worker_svc.logit_filter import LogitFilter
from worker_svc.step import SamplingParams

FILTERS: tuple[LogitFilter, ...] = tuple(
    import_module(f"{__name__}.{module.name}").FILTER for module in pkgutil.iter_modules(__path__)
)


def filters_of(params: SamplingParams) -> tuple[LogitFilter, ...]:
    """The filters that apply to a sequence."""
    return tuple(one for one in FILTERS if one.applies(params))
