"""The analyses by name. The command line, JSON documents, the page and the contract tests read this
table.

To add an analysis, write a function `analysis(source, prompts=None, *, task=None, n_prompts=None,
seed=0)` in one of the folders. Leave out arguments that it does not use, and get prompts and their
law from `prompts_and_law`. Its result has `to_frame`, `plot`, `COLUMNS` and `UNITS`. Then add a line below,
and run `python -m tests.cli.test_analysis_commands`, which writes the options of its command. A user's own function needs no line: `write_report(model, out, analyses=["classify", mine])`, `mechinterp analyse
my_module:mine MODEL`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import Any, cast

from mechinterp.analysis.needs import (
    Model,
    Needs,
    a_history,
    a_pool,
    edges_to_patch,
    every_position,
    few_edges,
    jumps_ahead,
    more_than_attention,
    never,
    nothing,
    one_attention,
    one_linear_layer,
    quick_curve,
    readable_patterns,
    several_heads,
    several_layers,
    weights_by_name,
)
from mechinterp.analysis.result import Finding
from mechinterp.checkpoints.io.files import one_line, with_place
from mechinterp.config import TaskLike, as_task
from mechinterp.config.task import UNKNOWN_TASK
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.n_prompts import usual_number
from mechinterp.models.run.predictor import Learner, is_learner

GIVEN = ("prompts", "clean")
"""Names of an argument for given prompts."""
NO_TARGET = "y_query is the target, as neither beta nor y_query_clean is given: an excess risk includes the noise"


@dataclass(frozen=True)
class Analysis:
    """An analysis: its function, the models that it accepts, and the models whose page includes it
    by default."""

    home: str | Callable[..., Finding]
    """The function, or its module in `mechinterp.analysis` and its name: "probing.probe:probe".
    """
    needs: Needs = nothing
    on_page: Needs = never
    many_runs: bool = False
    """True: each prompt costs many runs, so that a page never draws more prompts for it than its
    own default."""
    title: str = ""
    """Title of its section; empty: its name."""
    steps_on_page: Needs = never
    """Models with snapshots whose page shows the analysis at every saved step by default."""
    step_settings: Mapping[str, object] = field(default_factory=dict)
    """Arguments at the saved steps, where an overview would take too long."""

    @property
    def name(self) -> str:
        """Name of the function, with - for _: its name on the command line, in JSON and on the page.

        Example:
            >>> Analysis("probing.p_probe:p_probe").name
            'p-probe'
        """
        own = getattr(self.home, "__name__", None) or str(self.home).rpartition(":")[2]
        return own.replace("_", "-")

    @property
    def function(self) -> Callable[..., Finding]:
        """The function; its module is imported on first use."""
        if callable(self.home):
            return self.home
        module, _, name = self.home.partition(":")
        return getattr(import_module(f"mechinterp.analysis.{module}"), name)

    @property
    def options(self) -> dict[str, Parameter]:
        """Arguments after the model and the prompts, by name."""
        parameters = list(signature(self.function).parameters.values())[1:]
        return {p.name: p for p in parameters if p.name not in GIVEN}

    @property
    def takes_prompts_as(self) -> str | None:
        """Name of its argument for given prompts; None if it takes none."""
        return next((name for name in GIVEN if name in signature(self.function).parameters), None)

    @property
    def draws_prompts(self) -> bool:
        """True if it draws prompts, so that their number, seed and length can be chosen.

        Example:
            >>> ANALYSES["ablate"].draws_prompts, ANALYSES["circuits"].draws_prompts
            (True, False)
        """
        return {"n_prompts", "seed"} <= self.options.keys()

    @property
    def described(self) -> str:
        """Docstring of the function up to the first heading.

        Example:
            >>> ANALYSES["ablate"].described.endswith(".")
            True
        """
        paragraphs = cleandoc(self.function.__doc__ or "").split("\n\n")
        headings = ("Args:", "Returns:", "Raises:", "Source:", "See also:", "Example:")
        ends = [n for n, text in enumerate(paragraphs) if text.startswith(headings)]
        return " ".join(" ".join(paragraphs[: ends[0] if ends else None]).split())


ENTRIES = (
    Analysis("response.response:response", on_page=nothing, title="What it does with a prompt"),
    Analysis(
        "one_layer.classify:classify",
        on_page=nothing,
        steps_on_page=one_attention,
        title="What it computes",
    ),
    Analysis(
        "circuits:circuits",
        weights_by_name,
        on_page=nothing,
        steps_on_page=one_attention,
    ),
    Analysis(
        "one_layer.linear_components:linear_components",
        one_linear_layer,
        on_page=nothing,
        steps_on_page=nothing,
        title="Components of linear attention",
    ),
    Analysis(
        "one_layer.attention:attention_patterns",
        readable_patterns,
        on_page=nothing,
        title="Attention on prompts",
    ),
    Analysis("multi_layer.naming:name_algorithm"),
    Analysis("learners.compare:compare_learners", on_page=nothing, title="Which learner"),
    Analysis(
        "learners.error_curve:error_curve",
        on_page=quick_curve,
        steps_on_page=every_position,
        title="Loss over the number of examples",
    ),
    Analysis(
        "ablation.ablate:ablate",
        on_page=nothing,
        title="Head ablation",
        steps_on_page=more_than_attention,
        step_settings={"what": "heads"},
    ),
    Analysis(
        "ablation.pruning:prune",
        several_layers,
        on_page=several_heads,
        title="Pruning",
    ),
    Analysis("probing.probe:probe", on_page=more_than_attention, title="Probes"),
    Analysis("probing.p_probe:p_probe"),
    Analysis("patching.activations:patch_activations", many_runs=True),
    Analysis(
        "patching.edges:attribute_edges",
        edges_to_patch,
        on_page=few_edges,
        many_runs=True,
        title="Edges between heads",
    ),
    Analysis(
        "patching.circuit:circuit_faithfulness",
        edges_to_patch,
        many_runs=True,
    ),
    Analysis("learners.priors:compare_priors", a_pool, on_page=nothing),
    Analysis("training.history:history", a_history, on_page=nothing),
    Analysis(
        "training.jumps:jump_forecast",
        jumps_ahead,
        on_page=nothing,
        title="Jumps predicted from the initial weights",
    ),
    Analysis("training.learning_coefficient:local_learning_coefficient"),
)
"""Analyses in the order of the page."""
ANALYSES = {each.name: each for each in ENTRIES}
"""Analyses by name."""


def target_note(prompts: Prompts) -> str:
    """Note on given prompts without a noise-free target; empty if they have one."""
    no_target = not prompts.knows_task_vectors and prompts.y_query_clean is prompts.y_query
    return NO_TARGET if no_target else ""


def analysis_of(named: str | Callable[..., Finding]) -> tuple[str, Analysis]:
    """Name and analysis for a name (with - or _), a `module:function`, or a function.

    Modules in the current folder are found too.

    Raises:
        ValueError: If there is no such analysis.
    """
    if callable(named):
        analysis = Analysis(named)
        return analysis.name, analysis
    if isinstance(named, str) and ":" in named:
        return analysis_of(own_function(named))
    name = named.replace("_", "-") if isinstance(named, str) else None
    if name not in ANALYSES:
        raise ValueError(
            f"An analysis must be one of {', '.join(ANALYSES)}, or module:function, got {named!r}."
        )
    return name, ANALYSES[name]


def own_function(named: str) -> Callable[..., Any]:
    """The function `module:function`, of a module in the current folder or an installed one; its errors are one line.

    Raises:
        ValueError: If there is no such module or name, or it is not a function.
    """
    own = own_object(named)
    if not callable(own):
        raise ValueError(f"{named}: must be a function, got {type(own).__name__}.")

    @wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        except ValueError:  # one line already
            raise
        except (Exception, SystemExit) as error:
            raise ValueError(f"{named}: ended in {with_place(error)}.") from None

    return run


def own_object(named: str) -> Any:
    """The object `module:name`, of a module in the current folder or an installed one.

    Raises:
        ValueError: If there is no such module or name, or the module cannot be imported.
    """
    module, _, name = named.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"{named}: there is no module {module!r}.")
    try:
        own = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{named}: there is no module {error.name}.") from None
    except (Exception, SystemExit) as error:
        # A SyntaxError names its own place.
        said = (
            f"SyntaxError: {one_line(error)}"
            if isinstance(error, SyntaxError)
            else with_place(error)
        )
        raise ValueError(f"{named}: the import of {module} ended in {said}.") from None
    if own is None:
        raise ValueError(f"{named}: {module} has no {name!r}.")
    return own


def _argument_of_prompts(
    name: str, analysis: Analysis, prompts: Prompts | None, stated: Mapping[str, object]
) -> str:
    """Argument of the analysis that given prompts become; empty without given prompts.

    Args:
        stated: Options that say how prompts are drawn.
    Raises:
        ValueError: If the analysis takes no given prompts, draws none although options are stated, or both are stated.
    """
    if stated and not analysis.draws_prompts:
        option, value = next(iter(stated.items()))
        raise ValueError(f"{name} draws no prompts and takes no {option}, got {value}.")
    if prompts is None:
        return ""
    if analysis.takes_prompts_as is None:
        raise ValueError(f"{name} takes no given prompts, got {prompts!r}.")
    if stated.keys() - {"context_length"}:
        raise ValueError(
            f"{name} takes given prompts as they are: leave out n_prompts and seed, got {prompts!r}."
        )
    return analysis.takes_prompts_as


def run_analysis(
    named: str | Callable[..., Finding],
    checkpoint: Model | Learner,
    *,
    prompts: Prompts | None = None,
    task: TaskLike | None = None,
    context_length: int | None = None,
    n_prompts: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, object] | None = None,
) -> Finding:
    """Result of one analysis of a model, or of a function of prompts.

    Args:
        named: A name in `ANALYSES`, a `module:function`, or a function.
        prompts: Given prompts; None draws them.
        task: Law of the prompts; None: that of the model; "unknown": given prompts have no known
            law, which changes nothing for an analysis that takes no task.
        context_length: Pairs per prompt; None means the task's own length.
        n_prompts: Number of prompts; None means the default of the analysis.
        seed: Seed of the evaluation prompts; None means 0.
        settings: Further arguments of this analysis, by name.
    Raises:
        ValueError: If there is no such analysis, or it does not accept this model or such an
            argument. Also if it draws no prompts although prompts, their number, length or seed are
            given, or if it does not return a result.
    Example:
        >>> from mechinterp import load
        >>> run_analysis("circuits", load("checkpoints/softmax-h1-s0")).to_frame().shape
        (1, 19)
    """
    name, analysis = analysis_of(named)
    given = dict(settings or {})
    if task is not None and (task != UNKNOWN_TASK or "task" in analysis.options):
        given["task"] = task
    drawn_by = {"n_prompts": n_prompts, "seed": seed, "context_length": context_length}
    stated = {option: value for option, value in drawn_by.items() if value is not None}
    argument = _argument_of_prompts(name, analysis, prompts, stated)
    length = stated.pop("context_length", None)
    if prompts is not None:
        given[argument] = prompts if length is None else prompts.shortened(length)
    elif is_learner(checkpoint):
        if length is not None:
            given["task"] = replace(as_task(task or {}), context_length=length)
    elif length not in (None, (model := cast(Model, checkpoint)).task.context_length):
        checkpoint = model.at_length(length)
    given |= stated
    for option in given.keys() - analysis.options.keys() - {*GIVEN}:
        known = ", ".join(analysis.options) or "nothing"
        raise ValueError(f"{name} takes {known}, got {option}.")
    result = analysis.function(checkpoint, **_with_defaults(analysis, checkpoint, given))
    if not isinstance(result, Finding):
        raise ValueError(
            f"{name} must give a result with to_frame and plot, got {type(result).__name__}."
        )
    return result


def _with_defaults(
    analysis: Analysis, source: Model | Learner, given: dict[str, object]
) -> dict[str, object]:
    """The arguments, with a number of prompts and a seed for a function without defaults of its own."""
    unset = {n for n, each in analysis.options.items() if each.default is Parameter.empty}
    unset -= given.keys()
    if "n_prompts" in unset:
        given = {**given, "n_prompts": usual_number(source)}
    return {**given, "seed": 0} if "seed" in unset else given
