"""The analyses by name, which the command line, JSON documents, the page and its order, and the contract tests read.

To add one: write a function `analysis(source, prompts=None, *, n_prompts=None, seed=0)` in one of the rooms (leave out
the arguments it has no use for), which draws by `evaluation_prompts`, and whose result has `to_frame` and `plot`, and
add a line below. A user's own function needs no line: `write_report(model, out, analyses=["classify", mine])`,
`mechinterp analyse my_module:mine MODEL`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, cleandoc, signature
from pathlib import Path

from mechinterp.analysis import needs as has
from mechinterp.analysis.ablation.gates import learn_gates
from mechinterp.analysis.ablation.methods import ablate
from mechinterp.analysis.ablation.orders import greedy_order
from mechinterp.analysis.ablation.pairs import ablate_pairs
from mechinterp.analysis.ablation.prior_heads import prior_heads
from mechinterp.analysis.ablation.pruning_curves import prune_by_rules_and_orders
from mechinterp.analysis.learners.baselines import baselines
from mechinterp.analysis.learners.fits import fit_learners
from mechinterp.analysis.learners.priors import compare_priors
from mechinterp.analysis.multi_layer.algorithm import name_algorithm
from mechinterp.analysis.multi_layer.composition import composition_scores
from mechinterp.analysis.multi_layer.step_interventions import intervene_on_steps
from mechinterp.analysis.needs import Model, Needs, never, nothing
from mechinterp.analysis.one_layer.attention import attention_patterns
from mechinterp.analysis.one_layer.attention_entropy import attention_entropy
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.patching.edges import attribute_edges
from mechinterp.analysis.probing.feature_descent import p_probe
from mechinterp.analysis.probing.probing import probe
from mechinterp.analysis.probing.read_out_by_layer import read_out_by_layer
from mechinterp.analysis.result import Finding
from mechinterp.analysis.training.coefficient_snapshots import coefficient_snapshots
from mechinterp.analysis.training.deep_snapshots import deep_snapshots
from mechinterp.analysis.training.learning_coefficient import local_learning_coefficient
from mechinterp.analysis.training.linear_components import linear_snapshots
from mechinterp.analysis.training.milestones import milestones
from mechinterp.analysis.training.over_training import history_of
from mechinterp.analysis.training.prior_snapshots import prior_snapshots
from mechinterp.analysis.training.snapshots import training_snapshots
from mechinterp.models.run.evaluation import usual_number
from mechinterp.progress import ProgressCallback, no_progress


@dataclass(frozen=True)
class Analysis:
    """An analysis: its function, the models that it takes, and those whose page has it unasked."""

    function: Callable[..., Finding]
    needs: Needs = nothing
    on_page: Needs = never
    many_runs: bool = False
    """Whether each prompt costs many runs, so that a page that is told a number takes no more than its own."""
    title: str = ""
    """Of its section; else its name."""

    @property
    def options(self) -> dict[str, Parameter]:
        """Its arguments after the model and the prompts, by name."""
        parameters = list(signature(self.function).parameters.values())[1:]
        return {p.name: p for p in parameters if p.name not in ("prompts", "progress")}

    @property
    def draws_prompts(self) -> bool:
        """Whether it draws prompts, so that it can be told how many, by which seed and how long.

        Example:
            >>> ANALYSES["ablate"].draws_prompts, ANALYSES["circuits"].draws_prompts
            (True, False)
        """
        return {"n_prompts", "seed"} <= self.options.keys()

    @property
    def described(self) -> str:
        """What its docstring says before any heading.

        Example:
            >>> ANALYSES["ablate"].described.endswith(".")
            True
        """
        paragraphs = cleandoc(self.function.__doc__ or "").split("\n\n")
        headings = ("Args:", "Returns:", "Raises:", "Source:", "Example:")
        ends = [n for n, text in enumerate(paragraphs) if text.startswith(headings)]
        return " ".join(" ".join(paragraphs[: ends[0] if ends else None]).split())


ANALYSES: dict[str, Analysis] = {
    "classify": Analysis(classify, on_page=nothing, title="What it computes"),
    "circuits": Analysis(circuits, has.own_weights, on_page=nothing),
    "attention": Analysis(
        attention_patterns, has.patterns, on_page=nothing, title="Attention on prompts"
    ),
    "attention-entropy": Analysis(attention_entropy, has.a_distribution),
    "composition": Analysis(composition_scores, has.weights_of_layers),
    "algorithm": Analysis(name_algorithm),
    "algorithm-steps": Analysis(intervene_on_steps),
    "baselines": Analysis(baselines, on_page=has.more_than_attention, title="Excess risk"),
    "ablate": Analysis(ablate, on_page=nothing, title="Head ablation"),
    "pairs": Analysis(ablate_pairs),
    "order": Analysis(greedy_order),
    "gates": Analysis(learn_gates),
    "prune": Analysis(prune_by_rules_and_orders, on_page=has.more_than_attention, title="Pruning"),
    "probe": Analysis(probe, on_page=has.more_than_attention, title="Probes"),
    "p-probe": Analysis(p_probe),
    "read-out-by-layer": Analysis(read_out_by_layer, on_page=has.more_than_attention),
    "edges": Analysis(
        attribute_edges,
        has.edges_to_patch,
        on_page=has.few_edges,
        many_runs=True,
        title="Edges between heads",
    ),
    "fit": Analysis(fit_learners, on_page=has.one_attention, title="Which learner"),
    "priors": Analysis(compare_priors, has.a_pool, on_page=nothing),
    "prior-heads": Analysis(prior_heads, has.a_pool),
    "prior-snapshots": Analysis(prior_snapshots, has.a_pool),
    "snapshots": Analysis(
        training_snapshots,
        has.snapshots_of_attention,
        on_page=nothing,
        many_runs=True,
        title="Training, step by step",
    ),
    "head-snapshots": Analysis(
        deep_snapshots,
        has.snapshots,
        on_page=has.snapshots_of_layers,
        many_runs=True,
        title="Training, step by step",
    ),
    "component-snapshots": Analysis(
        linear_snapshots,
        has.snapshots_of_components,
        on_page=nothing,
        title="Components, step by step",
    ),
    "training": Analysis(history_of, has.a_history, on_page=nothing),
    "milestones": Analysis(milestones, has.a_history_of_scales),
    "learning-coefficient": Analysis(local_learning_coefficient),
    "coefficient-snapshots": Analysis(coefficient_snapshots, has.snapshots),
}
"""In this order they stand on the page."""


def suits(analysis: Analysis, source: Model) -> bool:
    """Whether the page of a model has an analysis unasked."""
    return analysis.needs(source) and analysis.on_page(source)


def analysis_of(named: str | Callable[..., Finding]) -> tuple[str, Analysis]:
    """Name and analysis of a name, of `module:function`, or of a function itself.

    Modules of the current folder are found, too.

    Raises:
        ValueError: If there is none.
    """
    if callable(named):
        return named.__name__.replace("_", "-"), Analysis(named)
    module, colon, function = named.partition(":")
    if not colon:
        if named not in ANALYSES:
            raise ValueError(
                f"An analysis must be one of {', '.join(ANALYSES)}, or module:function, got {named!r}."
            )
        return named, ANALYSES[named]
    return analysis_of(_imported(named, module, function))


def _imported(named: str, module: str, function: str) -> Callable[..., Finding]:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        own = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{named}: there is no module {error.name}.") from None
    except ValueError:
        own = None  # an empty name
    if not callable(own):
        raise ValueError(f"{named}: {module} has no function {function!r}.")
    return own


def run_analysis(
    named: str | Callable[..., Finding],
    checkpoint: Model,
    *,
    context_length: int | None = None,
    n_prompts: int | None = None,
    seed: int | None = None,
    progress: ProgressCallback = no_progress,
    settings: Mapping[str, object] | None = None,
) -> Finding:
    """The result of one analysis of a checkpoint.

    Args:
        named: One of `ANALYSES`, `module:function`, or a function.
        context_length: Pairs per prompt; None: the task's own.
        n_prompts: None: as many as the analysis takes by itself.
        seed: Of the evaluation prompts; None: 0.
        settings: Further arguments of this analysis.
    Raises:
        ValueError: If there is no such analysis, it does not take this model or such an argument, it draws no prompts
            and is told how many, how long or by which seed, or what it gives is no result.
    Example:
        >>> from mechinterp import load
        >>> run_analysis("circuits", load("checkpoints/softmax-h1-s0")).to_frame().shape
        (1, 13)
    """
    name, analysis = analysis_of(named)
    told = {"n_prompts": n_prompts, "seed": seed, "context_length": context_length}
    told = {option: value for option, value in told.items() if value is not None}
    if told and not analysis.draws_prompts:
        option, value = next(iter(told.items()))
        raise ValueError(f"{name} draws no prompts and takes no {option}, got {value}.")
    length = told.pop("context_length", None)
    if length not in (None, checkpoint.task.context_length):
        checkpoint = checkpoint.at_length(length)
    given = {**told, **(settings or {})}
    for option in given.keys() - analysis.options.keys():
        known = ", ".join(analysis.options) or "nothing"
        raise ValueError(f"{name} takes {known}, got {option}.")
    if "progress" in signature(analysis.function).parameters:
        given["progress"] = progress
    result = analysis.function(checkpoint, **{**_required(analysis, checkpoint), **given})
    if not isinstance(result, Finding):
        raise ValueError(
            f"{name} must give a result with to_frame and plot, got {type(result).__name__}."
        )
    return result


def _required(analysis: Analysis, source: Model) -> dict[str, int]:
    """Number and seed of the prompts of a function that has no default for them."""
    usual = {"n_prompts": usual_number(source), "seed": 0}
    options = analysis.options
    return {
        n: v for n, v in usual.items() if n in options and options[n].default is Parameter.empty
    }
