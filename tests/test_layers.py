"""The order of the floors: a module imports only modules that stand before it in one list."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mechinterp
from tests.test_doors import deep_softmax, gpt2_file

PACKAGE = Path(__file__).parents[1] / "mechinterp"

# Every module, lowest first, without the leading "mechinterp.". A new module goes behind all it imports
# and before all that import it.
ORDER = [
    "version",
    "fields",
    "progress",
    "config.task",
    "config.model",
    "config.train",
    "config.experiment",
    "config",
    "presets",
    "memory",
    "display",
    "figures",
    "theory.softmax",
    "theory.approximate_loss",
    "theory.preconditioning",
    "theory.several_tasks",
    "theory.two_heads",
    "theory.linear",
    "theory.linear_heads",
    "theory.linear_dynamics",
    "theory.linear_jumps",
    "theory.sparse",
    "icl.prompts",
    "icl.predictors",
    "icl.sparse_predictors",
    "icl.prompt_moments",
    "icl.algorithms",
    "icl.algorithm_fits",
    "models.shapes",
    "models.scores",
    "models.functional",
    "models.deep",
    "models.weights",
    "models.constructions",
    "models.constructions_sparse",
    "models.constructions_algorithms",
    "models.tokens",
    "models.units",
    "models.masks",
    "models.hooked_config",
    "models.checked_hooks",
    "models.attention",
    "models.blocks",
    "models.hooked_names",
    "models.transformer",
    "models.adapter",
    "models.backends.one_layer",
    "models.backends.token_map",
    "models.backends.hooks",
    "models.backends.weights_alone",
    "models.predictor",
    "models.module_hooks",
    "models.hook_map",
    "models.conformance_model",
    "models.conformance_tools",
    "models.conformance",
    "checkpoints.errors",
    "checkpoints.files",
    "checkpoints.claims",
    "checkpoints.tables",
    "checkpoints.pickles",
    "checkpoints.states",
    "checkpoints.headers",
    "checkpoints.archives",
    "checkpoints.hints",
    "checkpoints.names",
    "checkpoints.named_matrices",
    "checkpoints.folders",
    "checkpoints.folder_tensors",
    "checkpoints.outline",
    "checkpoints.native_tensors",
    "checkpoints.readings",
    "checkpoints.native",
    "checkpoints.recipe",
    "checkpoints.outside",
    "checkpoints.exchange",
    "checkpoints.arrays",
    "checkpoints.layered_tensors",
    "checkpoints.named_parts",
    "checkpoints.named_weights",
    "checkpoints.layer_models",
    "checkpoints.layer_readings",
    "checkpoints.layered_parts",
    "checkpoints.layered",
    "checkpoints.named_layers",
    "checkpoints.one_layer",
    "checkpoints.foreign",
    "checkpoints.settings",
    "checkpoints.loading",
    "checkpoints.plain_modules",
    "training.flat",
    "training.flow",
    "training.descent",
    "training.kernel",
    "training.step",
    "training.state",
    "training.run",
    "training.deep_kernel",
    "training.deep_step",
    "training.deep_attention",
    "training.deep",
    "training.batches",
    "training.trainer",
    "training.linear",
    "training.packs",
    "training.cluster",
    "training.sweep",
    "analysis.estimates",
    "analysis.verdict",
    "analysis.learners.standing",
    "analysis.circuits.circuits",
    "analysis.heads.errors",
    "analysis.circuits.manifold",
    "analysis.dynamics.plateaus",
    "analysis.dynamics.jumps",
    "analysis.circuits.thresholds",
    "analysis.circuits.components",
    "analysis.circuits.structure",
    "analysis.circuits.substitution",
    "analysis.circuits.reading",
    "analysis.circuits.null",
    "analysis.circuits.scales",
    "analysis.circuits.labels",
    "analysis.circuits.heads_verdict",
    "analysis.learners.algorithm_tests",
    "analysis.learners.algorithm_scores",
    "analysis.learners.algorithm_paths",
    "analysis.learners.algorithm_evidence",
    "analysis.learners.algorithm_labels",
    "analysis.learners.algorithm",
    "analysis.learners.algorithm_steps",
    "analysis.learners.layers_verdict",
    "analysis.learners.layered",
    "analysis.circuits.behind",
    "analysis.circuits.classification",
    "analysis.circuits.patterns",
    "analysis.results",
    "analysis.heads.ablation",
    "analysis.heads.subsets",
    "analysis.heads.masking",
    "analysis.heads.pairs",
    "analysis.probing.probes",
    "analysis.probing.p_probing",
    "analysis.probing.probing",
    "analysis.heads.gates",
    "analysis.heads.choices",
    "analysis.heads.edges",
    "analysis.heads.pruning",
    "analysis.heads.fine_tuning",
    "analysis.learners.baselines",
    "analysis.heads.pruning_curves",
    "analysis.heads.patching",
    "analysis.learners.fits",
    "analysis.learners.losses",
    "analysis.dynamics.histories",
    "analysis.dynamics.training",
    "analysis.circuits.attention",
    "analysis.dynamics.snapshots",
    "analysis.dynamics.linear_snapshots",
    "analysis.dynamics.deep_snapshots",
    "analysis.comparison",
    "analysis.dynamics.milestones",
    "analysis.analyses",
    "report.glossary",
    "report.text",
    "report.header",
    "report.info",
    "report.classification",
    "report.documents",
    "report.table",
    "report.bars",
    "report.terminal",
    "report.subject",
    "report.parts",
    "report.sections",
    "report.training",
    "report.html",
    "report.deep_sections",
    "report.probing",
    "report.edges",
    "report.algorithm_section",
    "report.contents",
    "report.page",
    "report.comparison",
    "cli.training",
    "cli.hints",
    "cli.options",
    "cli.analyses",
    "cli.checkpoints",
    "cli.reports",
    "cli.main",
    "cli",
]
FLOORS = [
    *("version", "fields", "progress"),
    *("config", "presets", "memory", "display", "figures", "theory", "icl", "models"),
    *(
        "checkpoints",
        "training",
        "analysis",
        "report",
        "cli",
    ),
]


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


def test_order_lists_every_module_once():
    missing = sorted(set(module_files()) - set(ORDER))
    gone = [name for name in ORDER if name not in module_files()]
    assert not missing, f"Add {missing} to ORDER in tests/test_layers.py, behind what they import."
    assert not gone, f"Take {gone} out of ORDER in tests/test_layers.py: there is no such file."
    assert len(ORDER) == len(set(ORDER)), "ORDER in tests/test_layers.py names a module twice."


def test_order_goes_up_the_floors():
    heights = [FLOORS.index(name.partition(".")[0]) for name in ORDER]
    assert heights == sorted(heights), f"ORDER must go up the floors {' < '.join(FLOORS)}."


@pytest.mark.parametrize("name", sorted(module_files()))
def test_module_imports_only_earlier_ones(name: str):
    assert name in ORDER, f"Add {name!r} to ORDER in tests/test_layers.py, behind what it imports."
    imported = imported_modules(module_files()[name].read_text(encoding="utf-8"))
    upward = sorted(imported - set(ORDER[: ORDER.index(name)]))
    assert not upward, f"{name} imports {upward}, which do not stand before it in ORDER."


FOLDERS = {file.parent.name for file in PACKAGE.glob("*/*.py")} - {"config", "cli"}


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_floors_import_nothing_by_themselves(folder: str):
    # An import in a floor's __init__ would run before each of its modules.
    assert not imported_modules((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))


def test_imports_are_seen_wherever_they_stand():
    source = """
import mechinterp.config
from mechinterp.models import scores
if TYPE_CHECKING:
    from mechinterp.icl.prompts import Prompts
def f():
    from mechinterp import load
    from mechinterp.training.step import membership, initial_weights
    from . import neighbour
    import numpy
"""
    assert imported_modules(source) == {
        "config",
        "models.scores",
        "icl.prompts",
        "mechinterp",
        "training.step",
        ".",
    }


def test_editors_are_told_the_public_names():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    told = {a.name: n.module for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert told == {**mechinterp._HOMES, "__version__": "mechinterp.version"}


def test_names_of_the_package_are_where_it_says():
    for name in set(mechinterp.__all__) - {"__version__"}:
        assert getattr(mechinterp, name).__name__ == name
    assert set(mechinterp.__all__) <= set(dir(mechinterp))
    with pytest.raises(AttributeError, match="module 'mechinterp' has no attribute 'nothing'"):
        _ = mechinterp.nothing


@pytest.mark.parametrize("kind", ["gpt2.pt", "model"])
def test_classify_needs_the_weights_alone(kind: str, tmp_path: Path):
    if kind == "model":
        deep_softmax(tmp_path)
    else:
        gpt2_file(tmp_path)
    arguments = ["classify", str(tmp_path / kind), "--n-prompts", "8", "--json"]
    arguments += ["--n-heads", "4"] if kind == "gpt2.pt" else []
    code = f"""
import sys
from mechinterp.cli import main
sys.argv = ["mechinterp", *{arguments}]
try:
    main()
except SystemExit as ended:
    assert not ended.code
loaded = [name for name in ("transformer_lens", "transformers", "torch._dynamo") if name in sys.modules]
print(loaded, file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["info", "nothing"],
        ["classify", "nothing"],
        ["train", "--list"],
        ["report", "nothing"],
        ["info", "checkpoints/softmax-h2-s0"],
    ],
)
def test_what_computes_nothing_loads_nothing_heavy(arguments: list[str]):
    arguments += ["--out", "nowhere"] if arguments[0] == "report" else []
    heavy = ["transformer_lens", "torch", "plotly", "scipy"]
    heavy += [] if "checkpoints/softmax-h2-s0" in arguments else ["pandas"]  # for its history
    code = f"""
import sys
from mechinterp.cli import main
sys.argv = ["mechinterp", *{arguments}]
try:
    main()
except SystemExit:
    pass
heavy = {heavy}
loaded = [name for name in heavy if name in sys.modules]
print(loaded, file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", ["mechinterp", "mechinterp.cli"])
def test_start_up_is_light(module: str):
    heavy = ["transformer_lens", "transformers", "sklearn", "ray", "numba"]
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    # Without the import hook of the tests, as a user starts it.
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
