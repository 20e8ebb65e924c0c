"""The analyses by name, which the command line, JSON documents, the page and its order, and the contract tests read.

To add one: write a function `analysis(source, prompts=None, *, n_prompts=None, seed=0)` in one of the rooms (leave out
the arguments it has no use for), which draws by `evaluation_prompts`, and whose result has `to_frame` and `plot`, and
add a line below, which says where it is. A user's own function needs no line: `write_report(model, out, analyses=["classify", mine])`,
`mechinterp analyse my_module:mine MODEL`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import Any

from mechinterp.analysis import needs as has
from mechinterp.analysis.needs import Model, Needs, never, nothing
from mechinterp.analysis.result import Finding
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import usual_number
from mechinterp.progress import ProgressCallback, no_progress

GIVEN = ("prompts", "clean")
"""Names of an argument for given prompts."""
NO_TARGET = "y_query stands for the target without noise, as neither beta nor y_query_clean is given: an excess risk holds the noise too"


@dataclass(frozen=True)
class Analysis:
    """An analysis: its function, the models that it takes, and those whose page has it unasked."""

    home: str | Callable[..., Finding]
    """The function, or the module of `mechinterp.analysis` that has it and its name: "probing.probing:probe"."""
    needs: Needs = nothing
    on_page: Needs = never
    many_runs: bool = False
    """Whether each prompt costs many runs, so that a page that is told a number takes no more than its own."""
    title: str = ""
    """Of its section; else its name."""

    @property
    def function(self) -> Callable[..., Finding]:
        """The function, its module loaded when it is first used."""
        if callable(self.home):
            return self.home
        module, _, name = self.home.partition(":")
        return getattr(import_module(f"mechinterp.analysis.{module}"), name)

    @property
    def options(self) -> dict[str, Parameter]:
        """Its arguments after the model and the prompts, by name."""
        parameters = list(signature(self.function).parameters.values())[1:]
        return {p.name: p for p in parameters if p.name not in (*GIVEN, "progress")}

    @property
    def takes_prompts_as(self) -> str | None:
        """Name of its argument for given prompts; None: it takes none."""
        return next((name for name in GIVEN if name in signature(self.function).parameters), None)

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
    "classify": Analysis("one_layer.classify:classify", on_page=nothing, title="What it computes"),
    "circuits": Analysis("one_layer.circuits:circuits", has.own_weights, on_page=nothing),
    "attention": Analysis(
        "one_layer.attention:attention_patterns",
        has.patterns,
        on_page=nothing,
        title="Attention on prompts",
    ),
    "attention-entropy": Analysis(
        "one_layer.attention_entropy:attention_entropy", has.a_distribution
    ),
    "composition": Analysis("multi_layer.composition:composition_scores", has.weights_of_layers),
    "algorithm": Analysis("multi_layer.naming:name_algorithm"),
    "baselines": Analysis(
        "learners.baselines:baselines", on_page=has.more_than_attention, title="Excess risk"
    ),
    "ablate": Analysis("ablation.methods:ablate", on_page=nothing, title="Head ablation"),
    "pairs": Analysis("ablation.orders:ablate_pairs"),
    "order": Analysis("ablation.orders:greedy_order"),
    "gates": Analysis("ablation.gates:learn_gates"),
    "prune": Analysis(
        "ablation.pruning_curves:prune_by_rules_and_orders",
        on_page=has.more_than_attention,
        title="Pruning",
    ),
    "probe": Analysis("probing.probing:probe", on_page=has.more_than_attention, title="Probes"),
    "p-probe": Analysis("probing.probing:p_probe"),
    "read-out-by-layer": Analysis(
        "probing.read_out_by_layer:read_out_by_layer", on_page=has.more_than_attention
    ),
    "edges": Analysis(
        "patching.edges:attribute_edges",
        has.edges_to_patch,
        on_page=has.few_edges,
        many_runs=True,
        title="Edges between heads",
    ),
    "fit": Analysis("learners.fits:fit_learners", on_page=has.one_attention, title="Which learner"),
    "priors": Analysis("learners.priors:compare_priors", has.a_pool, on_page=nothing),
    "prior-heads": Analysis("ablation.prior_heads:prior_heads", has.a_pool),
    "prior-snapshots": Analysis("training.prior_snapshots:prior_snapshots", has.a_pool),
    "snapshots": Analysis(
        "training.snapshots:training_snapshots",
        has.snapshots_of_attention,
        on_page=nothing,
        many_runs=True,
        title="Training, step by step",
    ),
    "head-snapshots": Analysis(
        "training.deep_snapshots:deep_snapshots",
        has.snapshots,
        on_page=has.snapshots_of_layers,
        many_runs=True,
        title="Training, step by step",
    ),
    "component-snapshots": Analysis(
        "training.linear_components:linear_snapshots",
        has.snapshots_of_components,
        on_page=nothing,
        title="Components, step by step",
    ),
    "training": Analysis("training.over_training:history_of", has.a_history, on_page=nothing),
    "milestones": Analysis("training.milestones:milestones", has.a_history_of_scales),
    "learning-coefficient": Analysis("training.learning_coefficient:local_learning_coefficient"),
    "coefficient-snapshots": Analysis(
        "training.coefficient_snapshots:coefficient_snapshots", has.snapshots
    ),
}
"""In this order they stand on the page."""


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
    prompts: Prompts | None = None,
    context_length: int | None = None,
    n_prompts: int | None = None,
    seed: int | None = None,
    progress: ProgressCallback = no_progress,
    settings: Mapping[str, object] | None = None,
) -> Finding:
    """The result of one analysis of a checkpoint.

    Args:
        named: One of `ANALYSES`, `module:function`, or a function.
        prompts: Given prompts; None: they are drawn.
        context_length: Pairs per prompt; None: the task's own.
        n_prompts: None: as many as the analysis takes by itself.
        seed: Of the evaluation prompts; None: 0.
        settings: Further arguments of this analysis.
    Raises:
        ValueError: If there is no such analysis, it does not take this model or such an argument, it draws no prompts
            and their number, length, seed or the prompts themselves are given, or its answer is no result.
    Example:
        >>> from mechinterp import load
        >>> run_analysis("circuits", load("checkpoints/softmax-h1-s0")).to_frame().shape
        (1, 13)
    """
    name, analysis = analysis_of(named)
    drawn_by = {"n_prompts": n_prompts, "seed": seed, "context_length": context_length}
    told: dict[str, Any] = {n: value for n, value in drawn_by.items() if value is not None}
    if told and not analysis.draws_prompts:
        option, value = next(iter(told.items()))
        raise ValueError(f"{name} draws no prompts and takes no {option}, got {value}.")
    given: dict[str, object] = {}
    if prompts is not None:
        name_of = analysis.takes_prompts_as
        if name_of is None or told.keys() & {"n_prompts", "seed"}:
            why = (
                "no given prompts"
                if name_of is None
                else "given prompts as they are: leave out n_prompts and seed"
            )
            raise ValueError(f"{name} takes {why}, got {prompts!r}.")
        length = told.pop("context_length", prompts.x.shape[1])
        given[name_of] = prompts.shortened(length)
    length = told.pop("context_length", None)
    if length not in (None, checkpoint.task.context_length):
        checkpoint = checkpoint.at_length(length)
    told |= settings or {}
    for option in told.keys() - analysis.options.keys():
        known = ", ".join(analysis.options) or "nothing"
        raise ValueError(f"{name} takes {known}, got {option}.")
    given |= told
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
