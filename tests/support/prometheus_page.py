"""The samples of a service's /metrics page."""

import re

_MODEL = re.compile(r'model="(?:[^"\\]|\\.)*",?')


def read_samples(page: str) -> dict[str, float]:
    """Samples by name and labels, summed over models."""
    samples: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = _MODEL.sub("", name).replace(",}", "}").replace("{}", "")
            samples[name] = samples.get(name, 0.0) + float(value)
    return samples
