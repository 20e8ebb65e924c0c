"""Pages of the documentation that are made from the code: the reference by room, and the gallery of figures."""

import ast
import re
from pathlib import Path

import plotly.graph_objects as go
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from plotly.offline import get_plotlyjs

import mechinterp

ROOT = Path(__file__).parents[1]
ROOMS = {
    "circuits": (
        "analysis/circuits",
        "What the weights of each head say, and the label of a model.",
    ),
    "heads": ("analysis/heads", "What breaks when heads are masked, pruned or patched."),
    "probing": ("analysis/probing", "What each layer has already computed."),
    "learners": ("analysis/learners", "Which closed-form learner or algorithm a model implements."),
    "dynamics": ("analysis/dynamics", "What happens during training."),
    "icl": ("icl", "Prompts of in-context linear regression, and learners that answer them."),
    "models": ("models", "The hooked model, its weights, and models built by hand."),
    "checkpoints": (
        "checkpoints",
        "Reading and writing models, also those of other people's code.",
    ),
    "training": ("training", "Training one model or many."),
    "theory": ("theory", "Closed forms of the papers."),
    "config": ("config", "Descriptions of tasks, models and training runs."),
}
SETUP = """
from mechinterp import *
from mechinterp.analysis.training.over_training import training_dynamics
softmax = load("checkpoints/softmax-h2-s0")
linear = load("checkpoints/linear-separate-s0")
sparse = load("checkpoints/sparse-h4-noise0.1-s0")
"""
FIGURES = {
    "QK and OV circuits of every head": "circuits(softmax).plot()",
    "Loss of the model and of closed-form learners": "fit_learners(softmax).plot()",
    "Excess risk of every subset of heads": "ablate_subsets(softmax).plot()",
    "Training of a two-head model": "training_dynamics(softmax).plot()",
    "What masking each head of a model of four layers costs": "ablate_heads(sparse).plot()",
    "Effective number of heads per layer": "ablate_heads(sparse).plot_importance()",
    "Pruning to the best head of each later layer": "prune(sparse).plot()",
    "What each layer has computed": "probe_layers(sparse).plot()",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages to those of the folder."""
    pages = {f"reference/{room}.md": reference(room, *ROOMS[room]) for room in ROOMS}
    pages["reference/top.md"] = top_level()
    pages["gallery.md"] = gallery()
    pages["plotly.min.js"] = get_plotlyjs()
    for file in (ROOT / "analyses" / "results").glob("*.png"):
        pages[f"papers/{file.name}"] = file.read_bytes()
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Pictures of results lie beside the page, and links to other files of the repository become their names."""
    markdown = re.sub(r"\]\(\.\./\.\./analyses/results/([a-z0-9_-]+\.png)\)", r"](\1)", markdown)
    return re.sub(
        r"\[([^\]]+)\]\((?:\.\./)+((?!papers|how)[a-z_]+/[^)]*)\)", r"\1 (`\2`)", markdown
    )


def reference(title: str, folder: str, about: str) -> str:
    """The public functions and classes of one folder, module by module."""
    lines = [f"# {title}", "", about, ""]
    for file in sorted((ROOT / "mechinterp" / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file.stem == "__init__" or not public(tree):
            continue
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        lines += [f"## {name}", "", ast.get_docstring(tree) or "", ""]
        for member in public(tree):
            lines += [f"::: {name}.{member}", ""]
    return "\n".join(lines)


def public(tree: ast.Module) -> list[str]:
    """Names of the functions and classes of a module that do not start with an underscore."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]


def top_level() -> str:
    """What `from mechinterp import ...` offers, with links to where it is described."""
    lines = ["# Top level", "", "Names that `from mechinterp import ...` offers.", ""]
    for name, home in mechinterp._HOMES.items():
        lines.append(f"- [`{name}`][{home}.{name}]")
    return "\n".join(lines)


def gallery() -> str:
    """Every figure with the line that makes it."""
    names: dict[str, object] = {}
    exec(SETUP, names)
    lines = ["# Gallery", "", "Each figure is made by the line above it, after", ""]
    lines += ["```python", SETUP.strip(), "```", "", '<script src="plotly.min.js"></script>']
    for title, code in FIGURES.items():
        figure = eval(code, names)
        if not isinstance(figure, go.Figure):
            raise TypeError(f"{code} must give a figure, got {type(figure).__name__}.")
        drawn = figure.to_html(full_html=False, include_plotlyjs=False)
        lines += ["", f"## {title}", "", "```python", code, "```", "", drawn]
    return "\n".join(lines)
