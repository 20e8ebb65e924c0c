"""Pages of the documentation that are made from the code: the reference by room, and the gallery of figures."""

import ast
import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import plotly.graph_objects as go
from docstrings import PUBLIC, inner_products
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from plotly.offline import get_plotlyjs

from mechinterp.analysis.needs import nothing
from mechinterp.analysis.registry import ANALYSES
from mechinterp.rooms import homes_of

ROOT = Path(__file__).parents[1]
ROOMS = {
    "one layer": (
        "analysis/one_layer",
        "What the weights of each head say, and the label of a model.",
    ),
    "several layers": (
        "analysis/multi_layer",
        "Circuits of all layers, and the algorithm they run.",
    ),
    "response": ("analysis/response", "What a model does with its prompt, without a label."),
    "ablation": ("analysis/ablation", "What breaks when heads are masked or pruned."),
    "patching": ("analysis/patching", "Which position and which edge between heads carries what."),
    "probing": ("analysis/probing", "What each layer has already computed."),
    "learners": ("analysis/learners", "Which closed-form learner or algorithm a model implements."),
    "dynamics": ("analysis/training", "What happens during training."),
    "prompts and learners": (
        "icl",
        "Prompts of in-context linear regression, and learners that answer them.",
    ),
    "models": ("models", "The hooked model, its weights, and models built by hand."),
    "checkpoints": (
        "checkpoints",
        "Reading and writing models, also those of other people's code.",
    ),
    "training": ("training", "Training one model or many."),
    "known answers": ("known", "Models with known answers, and scores of methods on them."),
    "theory": ("theory", "Closed forms of the papers."),
    "config": ("config", "Descriptions of tasks, models and training runs."),
}
SETUP = """
from mechinterp import *

softmax = load("softmax-h2-s0")
sparse = load("sparse-h4-noise0.1-s0")
gpt2 = load("garg-gpt2")
"""
FIGURES = {
    "What a model does with its prompt": "response(gpt2).plot()",
    "QK and OV of every head": "circuits(softmax).plot()",
    "A model beside closed-form learners": "compare_learners(softmax, context_lengths=[10, 20, 30, 40]).plot()",
    "Every subset of heads masked": "ablate(softmax, what='shapley').plot()",
    "Heads while they are trained": "history(softmax).plot()",
    "How good a model is after k examples": 'error_curve(load("garg-tiny-s0")).plot()',
    "The pool of tasks and ridge regression": 'compare_priors(load("pool-gpt2-m16-s0")).plot()',
    "Each head of a deep model masked alone": "ablate(gpt2, what='heads').plot()",
    "Importance of heads within each layer": "ablate(gpt2, what='heads').plot_importance()",
    "A pruned model": "prune(sparse).plot()",
    "What each layer has computed": "probe(sparse).plot()",
    "What a read-out finds after each layer": 'probe(sparse, targets="read_out").plot()',
    "Circuits of several layers": "circuits(sparse).plot()",
    "Which tokens a head attends to": "attention_patterns(softmax).plot()",
}
"""The line that makes each figure, by its heading."""


PLAIN = {"displayModeBar": False, "responsive": True}
"""Figures without the toolbar, which would cover what they show."""

WORKER = """
// Search runs in a worker, which a browser refuses a page that was opened from a folder: there it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.ready = new Promise((resolve) => {
        const page = this.inside.document;
        this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        this.inside.importScripts = (...urls) => Promise.all(urls.map((each) => new Promise((done) => {
          const script = page.createElement("script");
          script.src = each;
          script.onload = done;
          page.body.append(script);
        })));
        const script = page.createElement("script");
        script.src = url;
        script.onload = resolve;
        page.body.append(script);
      });
    }
    set onmessage(listener) { this.addEventListener("message", listener); }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages to those of the folder."""
    pages: dict[str, str | bytes] = {
        f"reference/{room.replace(' ', '_')}.md": reference(room, *ROOMS[room]) for room in ROOMS
    }
    pages["index.md"] = front()
    pages["reference/top.md"] = top_level()
    pages["gallery.md"] = gallery()
    pages["plotly.min.js"] = get_plotlyjs()
    pages["iframe-worker.js"] = WORKER
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{file.stem}.md"] = notebook(file)
    for file in (ROOT / "analyses" / "results").glob("*.png"):
        pages[f"papers/{file.name}"] = file.read_bytes()
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: object) -> str:
    """Pictures of results lie beside the page, links to other files of the repository become their names, and terms lead to
    their definitions."""
    markdown = re.sub(r"\]\(\.\./\.\./analyses/results/([a-z0-9_-]+\.png)\)", r"](\1)", markdown)
    markdown = re.sub(
        r"\[([^\]]+)\]\((?:\.\./)+((?!papers|how|results)[a-z_.]+/[^)]*|[A-Z]+\.md)\)",
        lambda link: f"{link[1]} (<code>{breakable(link[2])}</code>)",
        markdown,
    )
    return with_terms(markdown, page.file.src_uri)


def breakable(path: str) -> str:
    """A path that a browser may break after each part."""
    return re.sub("([/_])", r"\1<wbr>", path)


def with_terms(markdown: str, path: str) -> str:
    """A page on which each term of words.md, where it first stands as code, is a link to its definition."""
    if path == "words.md" or path.startswith("reference/"):
        return markdown
    words = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
    terms = {f"`{term}`": slugify(term, "-") for term in re.findall(r"^### (.+)$", words, re.M)}
    home = "../" * path.count("/") + "words.md"
    parts = re.split(
        r"(^```.*?^```$|^#.*?$|\[[^\]]*\]\([^)]*\)|`[^`\n]+`)", markdown, flags=re.M | re.S
    )
    for number, part in enumerate(parts):
        if anchor := terms.pop(part, None):
            parts[number] = f"[{part}]({home}#{anchor})"
    return "".join(parts)


def front() -> str:
    """README.md as the first page: its links to pages start here, and those to other files become their names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\[([^\]]+)\]\((?!https?:|docs/)([\w./]+)\)", r"\1 (`\2`)", text)
    return text.replace("](docs/", "](")


def reference(title: str, folder: str, about: str) -> str:
    """The public functions and classes of one folder, module by module."""
    lines = [f"# {title[0].upper()}{title[1:]}", "", about, ""]
    place = f"mechinterp.{folder.replace('/', '.')}"
    if (ROOT / "mechinterp" / folder / "__init__.pyi").exists():
        names = ", ".join(f"`{name}`" for name in homes_of(place))
        lines += [f"`from {place} import ...` has {names}.", ""]
    modules = {}
    for file in sorted((ROOT / "mechinterp" / folder).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file.stem != "__init__" and public(tree):
            modules[".".join(file.relative_to(ROOT).with_suffix("").parts)] = tree
    main = {name for name, path in PUBLIC.items() if path.rpartition(".")[0] in modules}
    if main:
        lines += ["The functions that most people need:", "", *names_table(sorted(main)), ""]
    for name in sorted(modules, key=lambda name: (not main & {*public(modules[name])}, name)):
        tree = modules[name]
        lines += [f"## {name.removeprefix(f'{place}.')}", "", f"`{name}`", ""]
        lines += [inner_products(ast.get_docstring(tree) or ""), ""]
        for member in sorted(public(tree), key=lambda member: member not in main):
            lines += [f"::: {name}.{member}", ""]
    return "\n".join(lines)


def notebook(file: Path) -> str:
    """A notebook as it was run: text, code, tables, pictures and what was printed."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    lines = [f"*As it was run; `make lab` opens it: notebooks/{file.name}.*", ""]
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines += [re.sub(r"\]\(([0-9a-z_]+)\.ipynb\)", r"](\1.md)", text), ""]
            continue
        lines += ["```python", text, "```", ""]
        for output in cell.get("outputs", []):
            lines += [_shown(output), ""]
    return "\n".join(lines)


def _shown(output: dict) -> str:
    data = {
        kind: "".join(value) for kind, value in output.get("data", {}).items() if "json" not in kind
    }
    if "image/png" in data:
        return f'<img alt="figure" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        return f'<div class="output">{" ".join(data["text/html"].split())}</div>'
    return f"```text\n{data.get('text/plain', ''.join(output.get('text', [])))}\n```"


def public(tree: ast.Module) -> list[str]:
    """Names of the functions and classes of a module that do not start with an underscore."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]


def top_level() -> str:
    """Tables of the names that `from mechinterp import ...` offers, by task, and of the models that each analysis takes."""
    lines = ["# Top level", "", "Names that `from mechinterp import ...` offers, by task."]
    homes = homes_of("mechinterp")
    left = [*homes]
    for room, (folder, _) in ROOMS.items():
        place = f"mechinterp.{folder.replace('/', '.')}"
        names = [name for name in left if f"{homes[name]}.".startswith(f"{place}.")]
        left = [name for name in left if name not in names]
        if names:
            lines += ["", f"## {room[0].upper()}{room[1:]}", "", *names_table(names)]
    lines += ["", "## Presets, tables and reports", "", *names_table(left)]
    lines += ["", "## Which analysis takes which model", ""]
    lines += ["`mechinterp NAME MODEL` runs each of these.", ""]
    rows = []
    for name, one in ANALYSES.items():
        function = one.function.__name__
        shown = "all of these" if one.on_page is nothing else needs(one.on_page)
        rows += [
            f"| `{name}` | [`{function}`][{PUBLIC[function]}] | {needs(one.needs)} | {shown} |"
        ]
    lines += table("Name", "Function | Models that it takes | On the report of", rows)
    for name in left:
        lines += ["", f"::: {PUBLIC[name]}"]
    return "\n".join(lines)


def names_table(names: list[str]) -> list[str]:
    """A table of public names with links, and the first line of each."""
    rows = [f"| [`{name}`][{PUBLIC[name]}] | {first_line(name)} |" for name in names]
    return table("Name", "What it is", rows)


def table(first: str, others: str, rows: list[str]) -> list[str]:
    """A table with these headings."""
    return [f"| {first} | {others} |", "|---" * (2 + others.count("|")) + "|", *rows]


def first_line(name: str) -> str:
    """What the docstring of a public name says first."""
    module, _, last = PUBLIC[name].rpartition(".")
    text = (getattr(import_module(module), last).__doc__ or "").strip().split("\n\n")[0]
    return inner_products(" ".join(text.split())).replace("|", "\\|")


def needs(condition: Callable) -> str:
    """A condition of the registry in words."""
    text = " ".join((condition.__doc__ or "").split()).rstrip(".")
    text = re.sub("^True (for|if) |^False for every model: the analysis runs ", "", text)
    return text[:1].lower() + text[1:]


def gallery() -> str:
    """Every figure with the line that makes it."""
    names: dict[str, object] = {}
    exec(SETUP, names)
    lines = ["# Gallery", "", "The line above each figure makes it, after these lines:", ""]
    lines += ["```python", SETUP.strip(), "```", "", '<script src="plotly.min.js"></script>']
    for heading, code in FIGURES.items():
        figure = eval(code, names)
        if not isinstance(figure, go.Figure):
            raise TypeError(f"{code} must give a figure, got {type(figure).__name__}.")
        lines += ["", f"## {heading}", "", "```python", code, "```", ""]
        if not figure.frames:  # the title of a figure with a slider changes
            lines += [f"{figure.layout.title.text}.", ""]
            figure.update_layout(title_text="", margin_t=40)
        lines += [
            figure.to_html(full_html=False, include_plotlyjs=False, config=PLAIN, auto_play=False)
        ]
    return "\n".join(lines)
