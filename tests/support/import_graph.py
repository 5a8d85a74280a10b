"""The imports of all packages of the tree, from their sources. Imports in functions and under TYPE_CHECKING count."""

import ast
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "quire": "protos",
    "quire_kernels": "kernels",
    "quire_client": "client",
    "quire_offline": "client",
    "svc_common": ".",
    "gateway_svc": ".",
    "scheduler_svc": ".",
    "worker_svc": ".",
}
"""Packages, and the folders that hold them."""

ImportGraph = Mapping[str, frozenset[str]]
"""The imports of each module: modules of the tree by full name, others as written."""


def read_imports() -> ImportGraph:
    """The imports of every module of `PACKAGES`."""
    sources: dict[str, str] = {}
    for package, folder in PACKAGES.items():
        for path in (ROOT / folder / package).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return {module: frozenset(imports_of(module, source, sources.keys())) for module, source in sources.items()}


def imports_of(module: str, source: str, known: Container[str]) -> Iterator[str]:
    """The imports of one module. `known` are the tree's modules: `from package import name` may import one of them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)


def find_circles(graph: ImportGraph) -> list[list[str]]:
    """Groups of modules that import each other, directly or not (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in graph[module] & graph.keys():
            if other not in index:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == index[module]:
            place = stack.index(module)
            if len(stack) - place > 1 or module in graph[module]:
                circles.append(sorted(stack[place:]))
            del stack[place:]

    for module in graph:
        if module not in index:
            visit(module)
    return circles


def is_within(module: str, package: str) -> bool:
    """Whether a module is a package, or in it."""
    return module == package or module.startswith(f"{package}.")
