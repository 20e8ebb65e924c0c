"""First look at a model: its loss, what was found and what was assumed, and which analyses run on it."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from torch import nn

from mechinterp import figures
from mechinterp.analysis import needs, registry
from mechinterp.analysis.learners.nearest import TaskLoss, task_loss
from mechinterp.analysis.patching.graph import graph_of
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.foreign.readings.losses import open_readings
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.modules.hooked import HookedModule, hook_module
from mechinterp.checkpoints.modules.weights import proof_of
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import Result, counted
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.hooked.gradients import require_gradients
from mechinterp.models.hooked.masks import require_sum
from mechinterp.models.hooked.module import ModuleHooks
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.evaluation import prompts_and_law
from mechinterp.models.run.predictor import predictor_of

N_LOSS_PROMPTS = 512
"""Default number of prompts of the losses."""
HOW = ("open", "assumed", "stated", "proven", "known")
"""Grounds of a setting, the least certain first: open, as several readings predict alike; assumed; stated by the file or the user; proven by predictions; known
from the module, its shapes or its format."""
WIDTH = 80
NEEDS: Mapping[needs.Needs, str] = {
    needs.one_linear_layer: "weights of one layer of linear attention, one response",
    needs.readable_patterns: "attention weights that can be read",
    needs.several_layers: "two layers or more",
    needs.edges_to_patch: "a checkpoint of two layers or more whose outputs add up",
    needs.a_history: "a training history, which this package or a Monitor records",
    needs.jumps_ahead: "a training of linear attention by this package",
    needs.a_pool: "a task with a pool of task vectors (n_tasks)",
}
"""Requirement of an analysis in words, by the test of the registry."""
OF_STREAM = ("probe", "p-probe", "patch-activations")
"""Analyses that read the stream at the query."""
EDGES = "attribute-edges"
UNTRAINED = "the model predicts no better than 0: it is untrained, or {} is wrong"
Setting = tuple[str, str, str]
"""Name and value of a setting, and its ground."""
Runs = tuple[bool, str]
"""True if an analysis runs on a model, and the requirement that the model lacks."""


@dataclass(frozen=True, eq=False, repr=False)
class Check(Result):
    """First look at a model: its loss, its settings, and the analyses that run on it."""

    model: str
    """Name and kind of the model, its layers and heads."""
    loss: TaskLoss
    """Losses of the model, of ridge regression and of predicting 0, unit y^2."""
    settings: pd.DataFrame
    """One row per setting: setting, value, how (open, assumed, stated, proven or known), the least certain first."""
    analyses: pd.DataFrame
    """One row per analysis of the registry: analysis, runs, lacks."""
    doubt: str = ""
    """Why the model may have been read wrongly; empty if nothing suggests it."""

    def __repr__(self) -> str:
        runs = self.analyses["runs"]
        return f"Check({self.model}; {runs.sum()} of {len(runs)} analyses run)"

    def __str__(self) -> str:
        """The whole answer, on one screen of a terminal."""
        lines = [self.model, f"Loss: {self.loss}."]
        lines += [f"Doubt: {self.doubt}."] if self.doubt else []
        for how, rows in self.settings.groupby("how", sort=False):
            listed = "; ".join(f"{row.setting} {row.value}" for row in rows.itertuples())
            lines.append(f"{str(how).capitalize()}: {listed}.")
        runs = self.analyses["runs"]
        lines.append(f"Runs: {', '.join(self.analyses['analysis'][runs])}.")
        lines += ["Does not run, and what it needs:"] if not runs.all() else []
        for lacks, rows in self.analyses[~runs].groupby("lacks", sort=False):
            lines.append(f"  {', '.join(rows['analysis'])}: {lacks}")
        fill = partial(textwrap.fill, width=WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        return "\n".join(fill(line) for line in lines)

    def to_frame(self) -> pd.DataFrame:
        """One row per analysis: its name, whether it runs, and what it lacks."""
        return self.analyses.copy()

    def plot(self) -> go.Figure:
        """Losses of the model, of ridge regression and of predicting 0."""
        loss = self.loss
        values = np.array([loss.model, loss.ridge, loss.zero])
        errors = np.array([loss.model_sem, loss.ridge_sem, loss.zero_sem])
        names = ["model", "ridge regression", "predicting 0"]
        return figures.bars(names, {"loss": (values, errors)}, title="Loss", y_title="loss (y²)")


def check(
    source: Checkpoint | HookedModule | nn.Module | str | Path,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> Check:
    """First look at a model: own loss and ridge's, layers and heads, what is assumed, which analyses run.

    Run it first. If the loss is far above ridge's, the task, `embed` or `read` may be wrong.

    Args:
        source: A checkpoint, a hooked module, a plain module, which is hooked, or the path of a file.
        prompts: Given prompts; None draws them.
        task: Law of the prompts: a TaskConfig, a dict of its fields or a JSON file. None: the law
            stated with the model, or the softmax paper's.
        n_prompts: Number of prompts of the losses; None: 512.
    Raises:
        ValueError: If the source is none of these, or as `hook_module` and `load` raise.
    See also:
        `hook_module`, `load`, `classify`, `write_report`.
    Example:
        >>> found = check("softmax-h2-s0")
        >>> found.model
        'softmax-h2-s0: 1 layer of 2 heads, native'
        >>> found.to_frame().set_index("analysis")["lacks"]["jump-forecast"]
        'a training of linear attention by this package'
    """
    model = _model(source, task)
    kind = _File(model) if isinstance(model, Checkpoint) else _Module(model)
    prompts, law = prompts_and_law(
        model,
        prompts,
        analysis="check",
        task=task,
        n_prompts=N_LOSS_PROMPTS if n_prompts is None else n_prompts,
        seed=seed,
    )
    predictor = predictor_of(model)
    with torch.no_grad():
        prediction = predictor.predict(prompts)
    best = ridge(prompts, penalty=0.0 if law is None else law.posterior_penalty)
    # numpy has no bfloat16
    dtype = torch.promote_types(
        torch.promote_types(prediction.dtype, prompts.y.dtype), torch.float32
    )
    loss = task_loss(prediction.to(dtype), best.to(dtype), prompts.to(dtype))
    heads, layers = counted(predictor.n_heads, "head"), counted(predictor.n_layers, "layer")
    settings = pd.DataFrame(
        [*_of_law(law, known=predictor.trained_here), *kind.settings()],
        columns=["setting", "value", "how"],
    )
    order = settings["how"].map(HOW.index)
    rows = [(name, *kind.runs(name, each)) for name, each in registry.ANALYSES.items()]
    untrained = "" if loss.model < loss.zero else UNTRAINED.format(kind.stated_by_user)
    return Check(
        model=f"{model.name}: {layers} of {heads}, {kind.in_words}",
        loss=loss,
        settings=settings.loc[order.sort_values(kind="stable").index].reset_index(drop=True),
        analyses=pd.DataFrame(rows, columns=["analysis", "runs", "lacks"]),
        doubt=predictor.doubt or untrained,
    )


def _model(source: object, task: TaskLike | None) -> Checkpoint | HookedModule:
    """The source as a checkpoint or a hooked module."""
    if isinstance(source, Checkpoint | HookedModule):
        return source
    if isinstance(source, str | Path):
        return load(source)
    if isinstance(source, nn.Module) and not isinstance(source, ICLTransformer):
        return hook_module(source, task=task)
    raise ValueError(
        f"check needs a checkpoint, a module of other code or a path, got a {type(source).__name__}."
    )


def _of_law(law: TaskConfig | None, *, known: bool) -> Iterator[Setting]:
    """Fields of the task."""
    if law is not None:
        for name, value in law.fields_in_words.items():
            yield name, value, "assumed" if name in law.assumed else "known" if known else "stated"


def _runs(analysis: registry.Analysis, model: Checkpoint | HookedModule) -> Runs:
    """True if a model satisfies the requirement of an analysis, else the requirement in words."""
    if analysis.needs(model):
        return True, ""
    return False, NEEDS.get(analysis.needs, (analysis.needs.__doc__ or "").split("\n")[0])


class _File:
    """Settings of a checkpoint, and the analyses that run on it."""

    stated_by_user = "the task"

    def __init__(self, model: Checkpoint) -> None:
        self.model = model
        self.in_words = model.format

    def settings(self) -> Iterator[Setting]:
        """The architecture as the file is read, and for a checkpoint of this package its config."""
        model, config = self.model, self.model.config.model
        named: dict[str, tuple[str, str]] = {}
        for how in HOW[1:]:
            for name, value in getattr(model, how).items():
                if name.startswith("model.") and value not in (None, (), []):
                    named[name.removeprefix("model.")] = (_short(value), how)
        if "attn_scale" in model.assumed:
            named["scale"] = (f"{1 / float(str(model.assumed['attn_scale'])):.4g}", "assumed")
        named |= {name: (values, "open") for name, values in _open_in(model).items()}
        if "predictions" in model.proven:
            named["predictions"] = (str(model.proven["predictions"]), "proven")
        for name, own in {
            "score": config.score,
            "norm": config.norm,
            "d_mlp": config.d_mlp,
        }.items():
            if own is not None:
                named.setdefault(name, (str(own), "known"))
        size = sum(tensor.numel() for tensor in model.weights.tensors.values())
        named["parameters"] = (f"{size:,}", "known")
        yield from ((name, *said) for name, said in named.items())

    def runs(self, name: str, analysis: registry.Analysis) -> Runs:
        return _runs(analysis, self.model)


def _open_in(model: Checkpoint) -> dict[str, str]:
    """Settings in which the possible readings of a file differ, with their values."""
    possible = [each.tried for each in open_readings(model.readings) if each.stands]
    values = {
        name: dict.fromkeys(_short(tried.get(name)) for tried in possible)
        for name in (possible[0] if possible else ())
    }
    return {name: " or ".join(each) for name, each in values.items() if len(each) > 1}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Module:
    """Settings of a hooked module, and the analyses that run on it."""

    in_words = "a PyTorch module with hooks"
    stated_by_user = "the task, embed= or read="

    def __init__(self, model: HookedModule) -> None:
        self.model = model
        self.proof = proof_of(model)

    def settings(self) -> Iterator[Setting]:
        """Input, prediction and heads, and whether the weights are proven."""
        model, proof = self.model, self.proof
        own = getattr(model.hooked.embed, "embed", None)
        yield "input", "tokens (x, y), query last" if own is None else "embed=", _stated(own)
        plain = getattr(model.hooked.read, "func", None) is not None
        yield "prediction", "last entries of the output" if plain else "read=", _stated(not plain)
        yield "heads before", ", ".join(dict.fromkeys(model.outputs)), "known"
        yield "parameters", f"{sum(p.numel() for p in model.model.module.parameters()):,}", "known"
        for values in proof.open:
            yield "reading", values, "open"
        if proof.readings:
            yield "weights by name", f"({proof.tried}; one predicts as the module does)", "proven"

    def runs(self, name: str, analysis: registry.Analysis) -> Runs:
        """True if an analysis runs on the module, else what it lacks."""
        model, proof = self.model, self.proof
        if name in (*OF_STREAM, EDGES):
            try:
                _require_stream(model, edges=name == EDGES)
            except ValueError as error:
                return False, " ".join(str(error).split()).removesuffix(".")
            return True, ""
        if analysis.needs is needs.weights_by_name:
            return bool(proof.readings), f"weights by name, but {proof.why}" if proof.why else ""
        runs, lacks = _runs(analysis, model)
        if not runs and analysis.needs is needs.readable_patterns:
            reasons = dict.fromkeys(model.model.unfollowed.values())
            lacks += f" ({next(iter(reasons))})" if reasons else ""
        return runs, lacks


def _stated(given: object) -> str:
    return "stated" if given else "assumed"


@torch.no_grad()
def _require_stream(module: HookedModule, *, edges: bool) -> None:
    """Refuse a module without a stream that can be read, or without edges in it."""
    hooked = module.hooked
    prompts = draw_prompts(module.task, 2, dtype=module.model.cfg.dtype)
    query_positions(hooked, prompts)
    if edges and isinstance(hooked.model, ModuleHooks):
        _, receivers = graph_of(hooked, "heads")
        require_sum(hooked, hooked.inputs(prompts))
        names = [name for node in receivers for name in (node.hook, node.stream)]
        require_gradients(hooked, hooked.inputs(prompts), names)
