"""A class name has one meaning within a service."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = (
    "gateway_svc",
    "scheduler_svc",
    "worker_svc",
    "svc_common",
    "kernels/quire_kernels",
    "client/quire_client",
    "client/quire_offline",
)


@pytest.mark.parametrize("service", SERVICES)
def test_no_class_name_stands_twice_in_a_service(service: str) -> None:
    modules = [ast.parse(path.read_text()) for path in (ROOT / service).rglob("*.py")]
    classes = Counter(node.name for module in modules for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    assert classes
    assert [name for name, count in classes.items() if count > 1] == []
