"""The analyses by name, which the command line, JSON documents and the page read.

To add one: write a function `analysis(source, prompts=None, *, n_prompts=4096, seed=0)` in one of the rooms (leave out
the arguments it has no use for), whose result has `to_frame` and `plot`, and add a line below. `mechinterp analyse NAME
PATH` then prints its table or JSON, and the report has a section on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Protocol, runtime_checkable

import pandas as pd
import plotly.graph_objects as go
import torch

from mechinterp.analysis.circuits.attention import attention_patterns
from mechinterp.analysis.circuits.circuits import circuits
from mechinterp.analysis.circuits.patterns import classify
from mechinterp.analysis.dynamics.coefficient_snapshots import coefficient_snapshots
from mechinterp.analysis.dynamics.deep_snapshots import deep_snapshots
from mechinterp.analysis.dynamics.learning_coefficient import local_learning_coefficient
from mechinterp.analysis.dynamics.linear_snapshots import linear_snapshots
from mechinterp.analysis.dynamics.milestones import milestones
from mechinterp.analysis.dynamics.snapshots import training_snapshots
from mechinterp.analysis.dynamics.training import training_dynamics
from mechinterp.analysis.heads.edges import attribute_edges
from mechinterp.analysis.heads.gates import learn_gates
from mechinterp.analysis.heads.masking import ablate
from mechinterp.analysis.heads.pairs import ablate_pairs, greedy_order
from mechinterp.analysis.heads.pruning import prune
from mechinterp.analysis.learners.algorithm import name_algorithm
from mechinterp.analysis.learners.algorithm_steps import intervene_on_steps
from mechinterp.analysis.learners.baselines import baselines
from mechinterp.analysis.learners.fits import fit_learners
from mechinterp.analysis.probing.p_probing import p_probe
from mechinterp.analysis.probing.probing import probe
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, sample_prompts
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
    "edges": attribute_edges,
    "fit": fit_learners,
    "snapshots": training_snapshots,
    "head-snapshots": deep_snapshots,
    "component-snapshots": linear_snapshots,
    "training": training_dynamics,
    "milestones": milestones,
    "learning-coefficient": local_learning_coefficient,
    "coefficient-snapshots": coefficient_snapshots,
}
MOST_HOOKED = 1024
"""Prompts that an analysis is given if it is not told how many, of a model that only hooks can run."""


def run_analysis(
    name: str,
    checkpoint: Checkpoint | HookedModule,
    *,
    context_length: int | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
    settings: Mapping[str, object] | None = None,
) -> Finding:
    """The result of one analysis of a checkpoint.

    Args:
        name: One of `ANALYSES`.
        context_length: Pairs per prompt; None: the task's own.
        n_prompts: None: as many as the analysis takes by itself.
        settings: Further arguments of this analysis.
    Raises:
        ValueError: If there is no such analysis, or it does not take this model.
    Example:
        >>> from mechinterp import load
        >>> run_analysis("circuits", load("checkpoints/softmax-h1-s0")).to_frame().shape
        (1, 13)
    """
    analysis = analysis_named(name)
    takes = signature(analysis).parameters
    task = task_of(checkpoint, context_length)
    given: dict[str, object] = {"seed": seed, "task": task, "progress": progress}
    if "prompts" in takes:
        default = takes["n_prompts"].default
        given["prompts"] = evaluation_prompts(
            checkpoint, task, n_prompts, seed=seed, default=default
        )
    elif n_prompts is not None:
        given["n_prompts"] = n_prompts
    given = {argument: value for argument, value in given.items() if argument in takes}
    return analysis(checkpoint, **given, **(settings or {}))


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


def task_of(checkpoint: Checkpoint | HookedModule, context_length: int | None) -> TaskConfig:
    """The task of a checkpoint, at another context length if one is asked for."""
    task = checkpoint.task
    return task if context_length is None else replace(task, context_length=context_length)


def evaluation_prompts(
    checkpoint: Checkpoint | HookedModule,
    task: TaskConfig,
    n_prompts: int | None,
    *,
    seed: int,
    default: int = 4096,
) -> Prompts:
    """Evaluation prompts, of models of attention alone in the dtype of their weights."""
    weights, alone = checkpoint.predictor.weights, checkpoint.predictor.attention_only
    dtype = weights.dtype if weights is not None and alone else torch.float64
    size = n_prompts or (default if alone else min(default, MOST_HOOKED))
    return sample_prompts(task, size, seed=seed, dtype=dtype)
