"""A format whose layers have formats of their own."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from worker_svc.model.formats._unread import UNREAD
from worker_svc.model.formats.dense import DenseFormat
from worker_svc.model.weight_format import BlockForm, StoredWeight, WeightFormat, block_form, group_bits

DENSE = DenseFormat()


class LayeredFormat:
    """A `WeightFormat` that asks that of a layer."""

    def __init__(
        self,
        default: WeightFormat,
        layers: Mapping[str, WeightFormat],
        patterns: Sequence[tuple[re.Pattern[str], WeightFormat]] = (),
        *,
        anywhere: bool = False,
    ) -> None:
        """`layers` by name; else a layer has the format of the first of `patterns` that its name begins with, or has
        `anywhere`, else `default`.
        """
        self._default, self._layers, self._patterns, self._anywhere = default, layers, patterns, anywhere

    def read_as(self, name: str) -> str | None:
        return None if name.endswith(UNREAD) else self._of(name.rpartition(".")[0]).read_as(name)

    def tensors(self, layer: str, outputs: int, inputs: int) -> Mapping[str, tuple[int, ...]]:
        return self._of(layer).tensors(layer, outputs, inputs)

    def weight(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return self._of(layer).weight(layer, tensors)

    def block_form(self, layer: str) -> BlockForm | None:
        return block_form(self._of(layer), layer)

    def group_bits(self, layer: str) -> int | None:
        return group_bits(self._of(layer), layer)

    def _of(self, layer: str) -> WeightFormat:
        if (found := self._layers.get(layer)) is not None:
            return found
        find = re.Pattern.search if self._anywhere else re.Pattern.match
        of_patterns = (found for pattern, found in self._patterns if find(pattern, layer))
        return next(of_patterns, self._default)
