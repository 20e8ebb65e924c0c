"""The floors: a module imports from its own floor and lower ones, and no imports go in a circle."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import mechinterp
from mechinterp.rooms import homes_of
from tests.conftest import python, sampled
from tests.test_doors import deep_softmax, gpt2_file

PACKAGE = Path(__file__).parents[1] / "mechinterp"

FLOORS = (
    *("version", "rooms", "fields", "progress", "interrupts", "config", "presets", "memory"),
    *("paper", "display", "figures", "heatmaps"),
    *(
        "theory",
        "icl",
        "models",
        "checkpoints",
        "training",
        "analysis",
        "known",
        "callbacks",
        "report",
        "cli",
    ),
)
"""Files and folders of the package, lowest first; imports go down, or stay on a floor."""


@cache
def module_files() -> dict[str, Path]:
    files = (
        file for file in PACKAGE.rglob("*.py") if file.name not in ("__init__.py", "__main__.py")
    )
    modules = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in files}
    # The folders that are imported by their own names, which stand for their files.
    return modules | {name: PACKAGE / name / "__init__.py" for name in ("config", "cli")}


def imported_modules(source: str, package: str = "mechinterp") -> set[str]:
    """Modules of the package that a source text imports anywhere, functions and TYPE_CHECKING included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = "." * node.level + (node.module or "")
            # `from mechinterp.icl import prompts` imports a module, `from mechinterp.icl.prompts import
            # Prompts` a name out of one.
            children = {f"{parent}.{alias.name}" for alias in node.names}
            modules = {child for child in children if child.partition(".")[2] in module_files()}
            names |= modules or {parent}
    inside = {name for name in names if name == package or name.startswith(f"{package}.")}
    relative = {name for name in names if name.startswith(".")}
    return {name.removeprefix(f"{package}.") for name in inside} | relative


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports."""
    return {
        name: imported_modules(file.read_text(encoding="utf-8"))
        for name, file in module_files().items()
    }


def test_imports_go_down():
    floors = {name: name.partition(".")[0] for name in module_files()}
    assert set(floors.values()) == set(FLOORS)
    upward = {
        (name, other)
        for name, others in imports().items()
        for other in others
        if other.partition(".")[0] not in FLOORS[: FLOORS.index(floors[name]) + 1]
    }
    assert not upward


def test_imports_make_no_circle():
    TopologicalSorter(imports()).prepare()  # its error names the circle


FOLDERS = {file.parent.name for file in PACKAGE.glob("*/*.py")} - {"config", "cli"}


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_floors_import_nothing_by_themselves(folder: str):
    # An import in a floor's __init__ would run before each of its modules.
    text = (PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")
    assert imported_modules(text) <= {"rooms"}


ROOT = PACKAGE.parent
DOCUMENTS = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.stem)
def test_documents_need_no_deep_imports_and_draw_prompts_by_seed(file: Path):
    text = file.read_text(encoding="utf-8")
    assert not re.findall(r"(?:from|import) mechinterp\.\w+\.\w+", text)
    assert "generator_for" not in text


def test_names_of_the_package_are_where_it_says():
    for name in set(mechinterp.__all__) - {"__version__"}:
        assert getattr(mechinterp, name).__name__ == name
    assert set(mechinterp.__all__) <= set(dir(mechinterp))
    for room in ("theory", "icl", "models", "training", "analysis"):
        module = import_module(f"mechinterp.{room}")
        for name, home in homes_of(module.__name__).items():
            assert home.startswith(f"mechinterp.{room}.")
            assert getattr(module, name) is getattr(import_module(home), name)


STARTED = """
import sys
from mechinterp.cli import main
try:
    main()
except SystemExit as ended:
    print(ended.code or 0, *sys.modules, file=sys.stderr)
"""
HEAVY = {"transformer_lens", "transformers", "torch._dynamo", "sklearn", "ray", "jinja2", "sympy"}
"""What no classification needs."""


def loaded_by(*arguments: str) -> tuple[str, set[str]]:
    """Exit code of a command in a process of its own, and the modules that it has loaded."""
    code, *modules = python("-c", STARTED, *arguments).done().err.splitlines()[-1].split()
    return code, set(modules)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", sampled(["x.pt", "model", "one layer", "linear stack"], keep="model".__eq__)
)
def test_classify_needs_the_weights_alone(kind: str, tmp_path: Path):
    gpt2_file(tmp_path)
    deep_softmax(tmp_path)
    shipped = {"one layer": "softmax-h2-s0", "linear stack": "sparse-h4-noise0.1-s0"}
    path = f"checkpoints/{shipped[kind]}" if kind in shipped else str(tmp_path / kind)
    hints = ("--n-heads", "4") if kind == "x.pt" else ()
    code, loaded = loaded_by("classify", path, "--n-prompts", "64", "--json", *hints)
    assert code == "0"
    assert "mechinterp.analysis.one_layer.classify" in loaded
    assert not HEAVY & loaded


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sparse-h4-noise0.1-s0", "garg-gpt2", "softmax-h2-s0"])
def test_pages_need_the_weights_alone(model: str, tmp_path: Path):
    arguments = ("report", f"checkpoints/{model}", "--out", str(tmp_path / "out"), "--quiet")
    code, loaded = loaded_by(*arguments, "--n-prompts", "128")
    assert code == "0"
    assert HEAVY & loaded <= {"jinja2"}


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--help"], set()),
        (["info", "nothing"], {"numpy"}),
        (["train", "--list"], {"numpy"}),
        (["info", "checkpoints/softmax-h2-s0"], {"numpy", "pandas"}),  # for its history
    ],
)
def test_what_computes_nothing_loads_nothing_heavy(arguments: list[str], allowed: set[str]):
    heavy = HEAVY | {"torch", "plotly", "scipy", "pandas", "numpy", "rich.progress"}
    _, loaded = loaded_by(*arguments)
    assert (heavy & loaded) <= allowed
    assert "mechinterp.analysis.one_layer.classify" not in loaded
