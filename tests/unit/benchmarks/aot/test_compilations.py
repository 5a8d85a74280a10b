"""What a kernel's machine code depends on is in its digest, and nothing else."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.aot.compiling import Compilations
from benchmarks.aot.machine_code import Figures

FIGURES = Figures(32, 0, 0, 0, 0, 0, 0)
DATA = {
    "name": "kernel",
    "signature": {"x": "*bf16"},
    "constant_vals": [16],
    "attrs_vals": [[["tt.divisibility", 16]]],
    "options": {"num_warps": 4, "arch": "sm90", "extern_libs": [["libdevice", "/one/place"]]},
    "key": "one",
    "target": {"backend": "cuda", "arch": 90},
}


def asked(compilations: Compilations, source: str, data: dict[str, Any], helper: str = "") -> tuple[bool, str]:
    """Whether Triton is kept from compiling a kernel, and its digest."""
    function = SimpleNamespace(jit_function=SimpleNamespace(cache_key=source))
    constants = {(1,): 16} | ({(2,): SimpleNamespace(cache_key=helper)} if helper else {})
    compiled = {"specialization_data": json.dumps(data), "constants": constants}
    is_known = compilations._is_known(fn=function, compile=compiled, repr="kernel")
    return is_known, compilations.digest_of(None)


def digest(source: str = "source", helper: str = "", **changes: Any) -> str:
    return asked(Compilations({}), source, DATA | changes, helper)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "other"},
        {"helper": "helper"},
        {"signature": {"x": "*fp16"}},
        {"constant_vals": [32]},
        {"attrs_vals": []},
        {"options": DATA["options"] | {"num_warps": 8}},  # type: ignore[operator]
        {"target": {"backend": "cuda", "arch": 86}},
    ],
    ids=str,
)
def test_a_kernel_that_compiles_to_other_code_has_another_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_where_triton_is_installed_changes_no_digest() -> None:
    elsewhere = {"num_warps": 4, "arch": "sm90", "extern_libs": [["libdevice", "/another"]]}
    assert digest(options=elsewhere, key="two") == digest()


def test_what_is_known_is_not_compiled() -> None:
    compilations = Compilations({digest(): FIGURES})
    assert asked(compilations, "source", DATA)[0]
    assert compilations.figures_of(None) == FIGURES
    assert not asked(compilations, "other", DATA)[0]
