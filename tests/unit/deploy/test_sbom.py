"""`make sbom`: the bills of materials have the packages that images install."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from large import large_but
from tools import missing

ROOT = Path(__file__).parents[3]
IMAGES = {
    "gateway": ("gateway",),
    "scheduler": ("scheduler",),
    "worker-cpu": ("worker", "torch-cpu"),
    "worker-cuda": ("worker", "torch-cuda"),
}


def pins(name: str) -> dict[str, tuple[str, set[str]]]:
    """The version of each package of a file in requirements/, and its SHA-256 digests."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found = {}
    for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]:
        package, version = entry.split()[0].split("==")
        found[package.lower()] = (version, set(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)))
    return found


@pytest.mark.parametrize(
    "image", large_but(["gateway", "scheduler", "worker-cpu", "worker-cuda"], "gateway", "worker-cuda")
)
def test_a_bill_of_materials_has_each_package_with_version_and_digests(image: str) -> None:
    if not (ROOT / "build/tools/.installed").exists():
        missing("`make sbom` installs its tools from a package index")
    bill = ROOT / "build" / "sbom" / f"{image}.cdx.json"
    bill.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", str(bill.relative_to(ROOT))], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(bill.read_text())
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "quire"
    listed = {
        component["name"].lower(): (
            component["version"],
            {
                digest["content"]
                for reference in component["externalReferences"]
                for digest in reference.get("hashes", ())
                if digest["alg"] == "SHA-256"
            },
        )
        for component in document["components"]
    }
    expected = {name: pin for part in IMAGES[image] for name, pin in pins(part).items()}
    assert expected
    assert listed == expected


def test_a_bill_is_made_for_each_image_that_is_built() -> None:
    (names,) = re.findall(r"^CONTENTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert names.split() == [*IMAGES]
    assert {name.partition("-")[0] for name in IMAGES} == {
        path.name.partition(".")[0] for path in (ROOT / "deploy/docker").glob("*.Dockerfile")
    }
