"""Who imports whom, read from the source: the engine knows little of drafters, and no module imports itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "drafters", "retrieval_index", "benchmarks")
PROTOCOL = {"drafters.registry", "drafters.parts"}
COMMAND = {"engine.__main__", "engine.cli.main", "engine.cli.index"}

Import = tuple[str, bool]
"""A module of ours, and whether it is imported as soon as the importing one is."""


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its name."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(module: str) -> set[Import]:
    """What the module imports of ours. What only annotations need is left out."""
    file = modules()[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return set(_imports(ast.parse(file.read_text("utf8")), package, True))


def _imports(node: ast.AST, package: str, at_once: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        at_once = False
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *filter(None, [node.module])])
        names = [name if (name := f"{source}.{alias.name}") in modules() else source for alias in node.names]
    yield from ((name, at_once) for name in names if name in modules())
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, at_once)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A path from each module that can be reached from itself back to it."""
    found = []
    for start in graph:
        paths, seen = [[start]], set()
        while paths:
            path = paths.pop()
            for name in graph[path[-1]]:
                if name == start:
                    found.append([*path, name])
                elif name not in seen:
                    seen.add(name)
                    paths.append([*path, name])
    return found


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"], ["c", "b", "c"]]
    assert ("engine.config", True) in imports("engine.frontend.supervisor")
    assert ("engine.api", False) in imports("engine.cli.main")
    assert ("benchmarks.inputs.questions", True) in imports("benchmarks.measure.load")


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles({module: {name for name, at_once in imports(module) if at_once} for module in modules()}) == []


def test_the_engine_imports_of_drafters_their_protocol_and_their_registry_alone() -> None:
    engine = [module for module in modules() if module.startswith("engine")]
    found = {(module, name) for module in engine for name, _ in imports(module) if name.startswith("drafters")}
    assert {(module, name) for module, name in found if name not in PROTOCOL and module not in COMMAND} == set()
    assert found


def test_benchmarks_are_imported_by_the_command_alone() -> None:
    others = [module for module in modules() if not module.startswith("benchmarks") and module not in COMMAND]
    assert [(module, name) for module in others for name, _ in imports(module) if name.startswith("benchmarks")] == []
