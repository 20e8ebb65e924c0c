"""The analyses by name, which the command line, JSON documents and the page read.

To add one: write a function `analysis(source, prompts=None, *, n_prompts=None, seed=0)` in one of the rooms (leave out
the arguments it has no use for), which draws by `evaluation_prompts`, and whose result has `to_frame` and `plot`, and add a line below. `mechinterp analyse NAME
PATH` then prints its table or JSON, and the report has a section on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Protocol, runtime_checkable

import pandas as pd
import plotly.graph_objects as go

from mechinterp.analysis.ablation.gates import learn_gates
from mechinterp.analysis.ablation.methods import ablate
from mechinterp.analysis.ablation.pairs import ablate_pairs, greedy_order
from mechinterp.analysis.ablation.prior_heads import prior_heads
from mechinterp.analysis.ablation.pruning import prune
from mechinterp.analysis.learners.baselines import baselines
from mechinterp.analysis.learners.fits import fit_learners
from mechinterp.analysis.learners.priors import compare_priors
from mechinterp.analysis.multi_layer.algorithm import name_algorithm
from mechinterp.analysis.multi_layer.composition import composition_scores
from mechinterp.analysis.multi_layer.step_interventions import intervene_on_steps
from mechinterp.analysis.one_layer.attention import attention_patterns
from mechinterp.analysis.one_layer.attention_entropy import attention_entropy
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.patching.edges import attribute_edges
from mechinterp.analysis.probing.feature_descent import p_probe
from mechinterp.analysis.probing.probing import probe
from mechinterp.analysis.probing.read_out_by_layer import read_out_by_layer
from mechinterp.analysis.training.coefficient_snapshots import coefficient_snapshots
from mechinterp.analysis.training.deep_snapshots import deep_snapshots
from mechinterp.analysis.training.learning_coefficient import local_learning_coefficient
from mechinterp.analysis.training.linear_components import linear_snapshots
from mechinterp.analysis.training.milestones import milestones
from mechinterp.analysis.training.over_training import training_dynamics
from mechinterp.analysis.training.prior_snapshots import prior_snapshots
from mechinterp.analysis.training.snapshots import training_snapshots
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.progress import ProgressCallback, no_progress


@runtime_checkable
class Finding(Protocol):
    """What an analysis returns."""

    def to_frame(self) -> pd.DataFrame: ...

    def plot(self) -> go.Figure: ...


Analysis = Callable[..., Finding]

ANALYSES: dict[str, Analysis] = {
    "classify": classify,
    "circuits": circuits,
    "attention": attention_patterns,
    "attention-entropy": attention_entropy,
    "composition": composition_scores,
    "algorithm": name_algorithm,
    "algorithm-steps": intervene_on_steps,
    "baselines": baselines,
    "ablate": ablate,
    "pairs": ablate_pairs,
    "order": greedy_order,
    "gates": learn_gates,
    "prune": prune,
    "probe": probe,
    "p-probe": p_probe,
    "read-out-by-layer": read_out_by_layer,
    "edges": attribute_edges,
    "fit": fit_learners,
    "priors": compare_priors,
    "prior-heads": prior_heads,
    "prior-snapshots": prior_snapshots,
    "snapshots": training_snapshots,
    "head-snapshots": deep_snapshots,
    "component-snapshots": linear_snapshots,
    "training": training_dynamics,
    "milestones": milestones,
    "learning-coefficient": local_learning_coefficient,
    "coefficient-snapshots": coefficient_snapshots,
}


def run_analysis(
    name: str,
    checkpoint: Checkpoint | HookedModule,
    *,
    context_length: int | None = None,
    n_prompts: int | None = None,
    seed: int | None = None,
    progress: ProgressCallback = no_progress,
    settings: Mapping[str, object] | None = None,
) -> Finding:
    """The result of one analysis of a checkpoint.

    Args:
        name: One of `ANALYSES`.
        context_length: Pairs per prompt; None: the task's own.
        n_prompts: None: as many as the analysis takes by itself.
        seed: Of the evaluation prompts; None: 0.
        settings: Further arguments of this analysis.
    Raises:
        ValueError: If there is no such analysis, it does not take this model, or it draws no prompts and is told
            how many, how long or by which seed.
    Example:
        >>> from mechinterp import load
        >>> run_analysis("circuits", load("checkpoints/softmax-h1-s0")).to_frame().shape
        (1, 13)
    """
    analysis = analysis_named(name)
    takes = signature(analysis).parameters
    asked = {"n_prompts": n_prompts, "seed": seed, "context_length": context_length}
    asked = {option: value for option, value in asked.items() if value is not None}
    if asked and not draws_prompts(analysis):
        option, value = next(iter(asked.items()))
        raise ValueError(f"{name} draws no prompts and takes no {option}, got {value}.")
    length = asked.pop("context_length", None)
    if length not in (None, checkpoint.task.context_length):
        checkpoint = at_length(checkpoint, length)
    given = {**asked, **(settings or {})}
    if "progress" in takes:
        given["progress"] = progress
    return analysis(checkpoint, **given)


def draws_prompts(analysis: Analysis) -> bool:
    """Whether an analysis draws prompts, so that it can be told how many, by which seed and how long.

    Example:
        >>> draws_prompts(ablate), draws_prompts(circuits)
        (True, False)
    """
    return {"n_prompts", "seed"} <= signature(analysis).parameters.keys()


def at_length(
    checkpoint: Checkpoint | HookedModule, context_length: int
) -> Checkpoint | HookedModule:
    """The same model of a task with another context length, at which all of its prompts are then drawn."""
    task = replace(checkpoint.task, context_length=context_length)
    if isinstance(checkpoint, HookedModule):
        assumed = tuple(name for name in checkpoint.assumed if name != "context_length")
        return replace(checkpoint, task=task, assumed=assumed)
    train = checkpoint.config.train
    # Training draws prompts no longer than the task's.
    if train.shortest_context is not None:
        train = replace(train, shortest_context=min(train.shortest_context, context_length))
    config = replace(checkpoint.config, task=task, train=train)
    stated = {n: v for n, v in checkpoint.assumed.items() if n != "task.context_length"}
    return replace(checkpoint, config=config, assumed=stated)


def analysis_named(name: str) -> Analysis:
    """The analysis of this name.

    Raises:
        ValueError: If there is none.
    """
    if name not in ANALYSES:
        raise ValueError(f"An analysis must be one of {', '.join(ANALYSES)}, got {name!r}.")
    return ANALYSES[name]


def described(analysis: Analysis) -> str:
    """The first sentence of its docstring.

    Example:
        >>> described(circuits)
        'QK and OV circuits of weights, a checkpoint or a one-layer hooked model, in float64.'
    """
    return " ".join((analysis.__doc__ or "").partition("\n\n")[0].split())
