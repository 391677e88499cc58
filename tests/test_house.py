"""The house: which folder may import which, read from the source. Whoever adds a folder gives it a floor here."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "drafters", "retrieval_index", "benchmarks")
MOST_FILES = 20  # of one folder, __init__.py aside

FLOORS = (  # folders and modules from the ground up: a floor imports itself and what is below it
    "engine.install_paths",  # where Talon's own files are
    "engine.commit",  # that it was built from
    "engine.core",
    "engine.config",
    "engine.device",  # copies to it and back, streams
    "engine.files",
    "engine.wire",
    "engine.costs",
    "engine.text",
    "engine.kernels",
    "engine.kernels.quant",
    "engine.kernels.gemm",
    "engine.kernels.attention",
    "engine.kernels.state",
    "engine.kernels.layer",
    "engine.sampling",
    "engine.weights",
    "engine.model",
    "engine.placement",  # which worker runs where, on how many threads
    "engine.drafting",
    "engine.verifier",
    "retrieval_index.ngrams",
    "retrieval_index",
    "drafters.parts",  # what the configuration says of a drafter
    "drafters.calibration",  # of every source's confidence
    "drafters.lookup",
    "drafters.heads",
    "drafters.heads.one_pass",
    "drafters.hybrid",
    "drafters",  # the factory
    "drafters.training",
    "drafters.learning",  # what a server learns, in a process of its own
    "engine.compile_ahead",
    "engine.worker",  # a verifier, a drafting worker and a drafter, put together
    "engine.frontend",
    "engine.answer",
    "engine.api",
    "engine",
    "engine.cli",
    "engine.server",
    "benchmarks.report",
    "benchmarks.inputs",
    "benchmarks.kernels",
    "benchmarks.measure",
    "benchmarks.tuning",
    "benchmarks.baselines",
    "benchmarks.cli",
    "benchmarks",
    "benchmarks.gpu",
    "benchmarks.shapes",
    "engine.cli.main",  # every command, put together
    "engine.__main__",
)

LATE = {  # modules that import within functions, or folders (with a dot), and why
    "benchmarks.baselines.run_vllm": "vLLM is in an environment of its own",
    "benchmarks.cli.": "options are checked and --help is shown before torch is there",
    "benchmarks.gpu.": "each step is a process of its own, and Triton is there with a GPU only",
    "benchmarks.kernels.modelled": "kernels ask for the processor's features when they are imported",
    "benchmarks.measure.check": "transformers' model classes take seconds, and few checks need them",
    "benchmarks.measure.clients": "httpx is of the extra bench",
    "benchmarks.measure.contestants": "transformers' model classes take seconds, and few contestants need them",
    "benchmarks.measure.ties": "the target is loaded a second time only where texts differ",
    "benchmarks.tuning.tune": "matplotlib is of the extra bench",
    "benchmarks.report.about": "torch and the kernels take seconds, which reports of old runs do not need",
    "benchmarks.report.out_folder": "matplotlib is of the extra bench",
    "drafters.heads.growth.ranking": "Triton is there with a GPU only",
    "drafters.heads.new_stack": "Triton is there with a GPU only",
    "drafters.learning.learner": "the process gives way before torch is there",
    "drafters.lookup.datastore": "numba takes half a second, which only users of an index pay",
    "drafters.parts": "numba takes half a second, which only users of an index pay",
    "drafters.registry": "torch takes seconds, which only methods with a model pay",
    "drafters.requirements": "the front end checks paths before torch and indexes are there",
    "drafters.training.cli": "options are checked and --help is shown before torch is there",
    "drafters.training.loss": "Triton is there with a GPU only",
    "engine.compile_ahead": "the kernels are imported once the process knows how to end",
    "engine": "names load on first use, so that workers import only what they need",
    "engine.__main__": "Ctrl-C during the first seconds, which are imports, ends in one line",
    "engine.cli.": "options are checked and --help is shown before torch is there",
    "engine.frontend.processes": "torch takes seconds, which the user's process saves where workers are processes",
    "engine.model.cuda.usable": "Triton is there with a GPU only",
    "engine.model.loading": "transformers takes seconds, which a model known from an earlier start does not need",
    "engine.model.target": "transformers takes seconds, which a model known from an earlier start does not need",
    "engine.model.trial.forward_choice": "Triton is there with a GPU only",
    "engine.sampling.matcher": "llguidance is of the extra grammar",
    "engine.server.command": "FastAPI is of the extra serve",
    "engine.server.traces": "OpenTelemetry is of the extra traces",
    "engine.verifier.forward_output": "Triton is there with a GPU only",
    "engine.placement": "the front end reads configurations without torch",
    "engine.weights.checkpoint_names": "transformers takes seconds, which a known model does not need",
    "engine.weights.gguf.file": "numba takes half a second, which a look at a file's header does not need",
    "engine.weights.hub": "the hub's client takes a second, which local files do not need",
    "engine.weights.resolve": "torch takes a second, which the user's process pays for packed experts alone",
    "engine.weights.tokenizer": "transformers takes seconds, while the verifier imports too",
    "engine.wire.keys": "only tcp needs the authenticator",
    "engine.worker": "a worker imports what its role needs, and reports a failed import in one line",
    "retrieval_index.datastore": "numba takes half a second, which checks of a folder do not need",
    "retrieval_index.session_index": "numba takes half a second, which only users of the index pay",
}


class Import(NamedTuple):
    """late: inside a function."""

    module: str
    late: bool


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its name."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text("utf8"))


@cache
def imports(module: str) -> frozenset[Import]:
    """What the module imports; of a library, its first name. What annotations alone need counts too."""
    package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(_imports(parsed(module), package, False))


def _imports(node: ast.AST, package: str, late: bool) -> Iterator[Import]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        late = True
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *filter(None, [node.module])])
        names = [name if (name := f"{source}.{alias.name}") in modules() else source for alias in node.names]
    yield from (Import(name if name in modules() else name.partition(".")[0], late) for name in names)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, late)


def ours(module: str) -> set[str]:
    """The other modules of ours that a module imports."""
    return {name for name, _ in imports(module) if name in modules() and name != module}


def floor_of(module: str) -> str | None:
    """The longest name of FLOORS that is the module or a folder that it is in. The floor of a top-level folder is
    that of its own files: every folder in it has to have one.
    """
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOORS and (name not in PACKAGES or len(parts) <= 2)), None)


def floor(module: str) -> int:
    return FLOORS.index(floor_of(module) or f"no floor: {module}")


def reason_of(module: str) -> str | None:
    """The key of LATE that is the module, or a folder (a name that ends with a dot) that it is in."""
    return next((name for name in LATE if name == module or (name.endswith(".") and module.startswith(name))), None)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A path from each node that can be reached from itself back to it."""
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


def test_the_source_is_read_as_it_is() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"], ["c", "b", "c"]]
    assert Import("engine.config", False) in imports("engine.frontend.supervisor")
    assert Import("engine.api", True) in imports("engine.cli.main")
    assert Import("benchmarks.inputs.questions", False) in imports("benchmarks.measure.load")
    assert Import("engine.api", False) in imports("engine.cli.answer_file"), "an annotation's"
    assert floor("engine.cli.main") > floor("benchmarks.cli.checks") > floor("engine.cli.command")


def test_imports_run_downwards() -> None:
    found = [(module, name) for module in modules() for name in ours(module) if name not in PACKAGES]
    assert [(module, name) for module, name in found if floor(name) > floor(module)] == []
    assert len(found) > 1000


def test_every_floor_is_lived_on() -> None:
    assert {floor_of(module) for module in modules()} == set(FLOORS)


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles({module: ours(module) for module in modules()}) == []


def test_the_engine_knows_of_drafters_their_factory_alone() -> None:
    engine = [module for module in modules() if module.startswith("engine") and not module.startswith("engine.cli")]
    found = {(module, name) for module in engine for name in ours(module) if name.startswith("drafters")}
    assert {(module, name) for module, name in found if name != "drafters.registry"} == set()
    assert found


def test_benchmarks_are_imported_by_the_command_alone() -> None:
    others = [module for module in modules() if not module.startswith("benchmarks") and module != "engine.cli.main"]
    assert [(module, name) for module in others for name in ours(module) if name.startswith("benchmarks")] == []


def test_imports_within_functions_have_a_reason() -> None:
    late = {module for module in modules() if any(one.late for one in imports(module))}
    assert {module for module in late if reason_of(module) is None} == set()
    assert {reason_of(module) for module in late} == set(LATE), "a reason that nothing needs"


def test_a_folder_is_small_enough_to_be_read() -> None:
    count = Counter(file.parent for file in modules().values() if file.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): n for folder, n in count.items() if n > MOST_FILES} == {}


def test_every_package_says_what_lives_there() -> None:
    packages = [module for module, file in modules().items() if file.name == "__init__.py"]
    assert [module for module in packages if not ast.get_docstring(parsed(module))] == []
    folders = {file.parent for file in modules().values()}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_a_name_of_a_class_means_one_thing() -> None:
    homes = defaultdict(list)
    for module in modules():
        for node in parsed(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
