"""Adapters that lie beside a model's weights (PEFT's files), and the linear layers to which they attach."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A change of some linear layers, named as the checkpoint stores them."""

    kind: str
    """As PEFT names it: lora."""
    targets: tuple[str, ...]
    """The last parts of the names of linear layers; where `is_pattern`, one regular expression of whole names."""
    is_pattern: bool = False

    def attaches_to(self, layer: str) -> bool:
        """Whether it changes the stored linear layer of this name."""
        if self.is_pattern:
            return re.fullmatch(self.targets[0], layer) is not None
        return any(layer == target or layer.endswith(f".{target}") for target in self.targets)


def read_adapters(directory: Path) -> tuple[Adapter, ...]:
    """The adapters of a model directory: one, or none."""
    path = directory / _CONFIG
    if not path.is_file():
        return ()
    config = json.loads(path.read_text())
    kind = str(config.get("peft_type", "unnamed")).lower()
    targets = config.get("target_modules") or ()
    # PEFT's word for every linear layer but the head
    if targets == "all-linear":
        targets = r".*\.layers\..*"
    if isinstance(targets, str):
        return (Adapter(kind, (targets,), is_pattern=True),)
    return (Adapter(kind, tuple(targets)),)
