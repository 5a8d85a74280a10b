"""Imports go from higher layers to lower ones, without circles. Imports for types count, too."""

import sys

import pytest

from import_graph import PACKAGES, ImportGraph, find_circles, imports_of, is_within, read_imports

MAY_IMPORT = {
    "quire": {"quire_offline"},  # when a program uses one of its classes
    "quire_kernels": set[str](),
    "svc_common": {"quire"},
    "quire_client": {"quire"},
    "gateway_svc": {"quire", "svc_common"},
    "scheduler_svc": {"quire", "svc_common"},
    "worker_svc": {"quire", "svc_common", "quire_kernels"},
    "quire_offline": {"quire", "quire_client", "svc_common", "gateway_svc", "scheduler_svc", "worker_svc"},
}
"""The packages that each package may import."""

CORE = "scheduler_svc.core"
CORE_LAYERS: list[set[str]] = [
    {"results", "lazy_heap", "totals", "account_limits", "sequence_ids"},
    {"budgets"},
    {"request"},
    {"step", "events", "replica_shape"},
    {"costs", "output_lengths"},
    {"kv"},
    {"replica", "admission"},
    {"policy", "beam_search", "step_pacing"},
    {"limits"},
    {"planning"},
    {"result_checks"},
    {"request_table"},
    {"beams"},
    {"committer"},
    {"scheduler"},
    {"explain"},
]
"""Modules and folders of the scheduler's core, lowest layer first. Each imports only from lower layers and itself."""

MAY_NOT_IMPORT = [
    ("worker_svc.gpu", "worker_svc.model"),
    ("worker_svc.model", "grpc"),
    # A running request and its subscription depend on each other only through the reader interface.
    ("gateway_svc.running_request", "gateway_svc.subscriptions"),
    ("gateway_svc.subscriptions", "gateway_svc.running_request"),
    ("scheduler_svc.live_requests", "scheduler_svc.sessions"),
    ("gateway_svc", "torch"),
    ("scheduler_svc", "torch"),
    ("svc_common", "torch"),
    ("quire_kernels", "grpc"),
]


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return read_imports()


def test_every_package_is_read(graph: ImportGraph) -> None:
    assert {module.split(".")[0] for module in graph} == set(PACKAGES) == set(MAY_IMPORT)
    assert "scheduler_svc.core.replica" in graph["scheduler_svc.core.scheduler"]


def test_no_modules_import_each_other(graph: ImportGraph) -> None:
    assert find_circles(graph) == []


def test_packages_import_only_what_they_may(graph: ImportGraph) -> None:
    wrong = {
        f"{module} imports {other}"
        for module, imports in graph.items()
        for other in imports
        if (package := other.split(".")[0]) in PACKAGES
        if package != module.split(".")[0] and package not in MAY_IMPORT[module.split(".")[0]]
    }
    assert wrong == set()


def test_layers_of_the_core_import_only_lower_ones(graph: ImportGraph) -> None:
    level = {name: number for number, layer in enumerate(CORE_LAYERS) for name in layer}
    modules = {module: imports for module, imports in graph.items() if module.startswith(f"{CORE}.")}
    assert {_room(module) for module in modules} == set(level), "the table has every module and room of the core"
    wrong = {
        f"{module} imports {other}"
        for module, imports in modules.items()
        for other in imports
        if other.startswith(f"{CORE}.")
        and _room(other) != _room(module)
        and level[_room(other)] >= level[_room(module)]
    }
    assert wrong == set()


def test_core_imports_nothing_but_itself_and_the_standard_library(graph: ImportGraph) -> None:
    others = {
        other
        for module, imports in graph.items()
        if is_within(module, CORE)
        for other in imports
        if not is_within(other, CORE)
    }
    assert {other for other in others if other.split(".")[0] not in sys.stdlib_module_names} == set()
    assert not {"asyncio", "threading", "socket", "time"} & {other.split(".")[0] for other in others}


def test_blocks_and_their_index_are_reached_through_the_kv_manager(graph: ImportGraph) -> None:
    room = f"{CORE}.kv"
    inner = {f"{room}.{name}" for name in ("block_pool", "eviction", "prefix_index", "computing", "swap")}
    assert inner <= graph.keys()
    assert [m for m, imports in graph.items() if not is_within(m, room) and imports & inner] == []


@pytest.mark.parametrize(("package", "barred"), MAY_NOT_IMPORT)
def test_package_does_not_import(graph: ImportGraph, package: str, barred: str) -> None:
    modules = [module for module in graph if is_within(module, package)]
    assert modules
    wrong = [f"{module} imports {other}" for module in modules for other in graph[module] if is_within(other, barred)]
    assert wrong == []


# The reader itself.


def test_imports_in_functions_and_for_types_are_found() -> None:
    source = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from c import d
def f():
    from c import E
"""
    assert set(imports_of("m", source, {"c.d"})) == {"a.b", "typing", "c.d", "c"}


def test_circles_are_found() -> None:
    graph = {
        "a": frozenset({"b"}),
        "b": frozenset({"c"}),
        "c": frozenset({"b", "d", "re"}),
        "d": frozenset({"d"}),
        "e": frozenset({"a"}),
    }
    assert sorted(find_circles(graph)) == [["b", "c"], ["d"]]


def _room(module: str) -> str:
    return module.removeprefix(f"{CORE}.").split(".")[0]
