"""A report on one checkpoint: one HTML page that opens offline, and the CSV files behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import jinja2
import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from mechinterp import figures
from mechinterp.analysis.circuits import circuits
from mechinterp.analysis.dynamics import training_dynamics
from mechinterp.analysis.fits import LearnerFits, fit_learners
from mechinterp.analysis.heads import (
    MAX_SUBSET_HEADS,
    METHODS,
    HeadAblation,
    ablate_heads,
    ablate_subsets,
)
from mechinterp.analysis.patterns import Classification, Thresholds, classify
from mechinterp.checkpoints.files import write_atomically
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.config import TrainConfig
from mechinterp.icl.prompts import generator_for, sample_prompts

PAGE = "index.html"
LONGEST_TABLE = 40
FIGURE_OPTIONS = {"responsive": True, "displaylogo": False}


@runtime_checkable
class Result(Protocol):
    """What every analysis gives back."""

    def to_frame(self) -> pd.DataFrame: ...

    def plot(self) -> go.Figure: ...


@dataclass(frozen=True)
class Section:
    """One part of the page: what it says, its figures, its tables, and how they were computed."""

    title: str
    text: str
    method: str
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """By name; each becomes <name>.csv, and is shown up to 40 rows."""


@dataclass(frozen=True)
class Report:
    """Where a report was written."""

    page: Path
    tables: tuple[Path, ...]
    verdict: str

    def to_document(self) -> dict:
        """The same as JSON knows it."""
        tables = [str(table) for table in self.tables]
        return {"page": str(self.page), "tables": tables, "verdict": self.verdict}


def write_report(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    n_prompts: int = 4096,
    seed: int = 0,
    overwrite: bool = False,
) -> Report:
    """Write `out/index.html` and the CSV files behind it.

    Args:
        n_prompts: Prompts behind the ablations; the fits take five times as many per context length.
    Raises:
        ValueError: If `out` is a file, or a folder that holds anything and `overwrite` is not set.
    Example:
        >>> import tempfile
        >>> from mechinterp.checkpoints.native import load
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = write_report(load("checkpoints/softmax-h1-s0"), folder, n_prompts=256)
        ...     report.page.name
        'index.html'
    """
    out = Path(out)
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise ValueError(
            f"{out}: already exists and is not overwritten; choose another --out, or --overwrite."
        )
    classification = classify(checkpoint, n_prompts=n_prompts, seed=seed)
    fits = fit_learners(checkpoint, n_prompts=5 * n_prompts, seed=seed)
    sections = [
        _heads(classification),
        _circuits(checkpoint),
        _ablation(checkpoint, classification, n_prompts, seed),
        _fits(fits, classification),
        *_training(checkpoint),
    ]
    verdict = verdict_sentence(checkpoint.name, classification, fits)
    tables = []
    for name, frame in [table for section in sections for table in section.tables.items()]:
        tables.append(out / f"{name}.csv")
        write_atomically(tables[-1], partial(frame.to_csv, index=False))
    html = _render(checkpoint, verdict, sections)
    write_atomically(out / PAGE, lambda file: file.write_text(html, encoding="utf-8"))
    return Report(out / PAGE, tuple(tables), verdict)


def write_figure(file: Path, figure: go.Figure) -> None:
    """Write one figure as an HTML page that opens offline.

    Raises:
        ValueError: If the file exists or does not end in .html.
    """
    if file.suffix != ".html":
        raise ValueError(f"{file}: must end in .html.")
    if file.exists():
        raise ValueError(f"{file}: already exists; it is not overwritten.")
    html = figure.to_html(include_plotlyjs=True, config=FIGURE_OPTIONS)
    write_atomically(file, lambda target: target.write_text(html, encoding="utf-8"))


def verdict_sentence(name: str, classification: Classification, fits: LearnerFits) -> str:
    """What the model is, with the numbers that earned it."""
    meaning = {
        "debiased_gd": "implements one step of debiased gradient descent",
        "preconditioned_gd": "is one step of preconditioned debiased gradient descent",
        "weighted_preconditioned_gd": "is one weighted debiased step that all responses share",
        "task_heads": "is one debiased gradient step per response, each with heads of its own",
        "superposition": "is one debiased gradient step per response, made by shared heads",
        "linear_gd": "is one preconditioned gradient step by linear attention",
        "kernel_regression": "is a kernel smoother",
        "unstructured": "is no more structured than random weights",
        "undetermined": "shows none of the known patterns clearly",
    }
    return f"{name} {meaning[classification.pattern]} ({classification.reason}). {fits.verdict}"


def _heads(found: Classification) -> Section:
    numbers = pd.DataFrame(
        [
            ("pattern", found.pattern),
            ("sign_matching", str(found.sign_matching).lower()),
            ("omega_spread", _number(found.scales.omega_spread)),
            ("zero_sum", _number(found.scales.zero_sum)),
            ("eta = Σ mu·omega", ", ".join(_number(eta) for eta in found.scales.eta)),
            ("optimal eta for the task", _number(found.scales.eta_optimal)),
            ("gamma of the nearest point of the solution manifold", _number(found.scales.gamma)),
            ("distance to the solution manifold", _number(found.scales.manifold_distance)),
            *(
                (label, f"{_number(part.r2)} ± {_number(part.r2_sem)}")
                for label, part in (
                    ("R² with idealised heads", found.substitution),
                    ("R² of the closed form", found.learner),
                )
            ),
            *_component_rows(found),
            *((f"p of {name}", _number(p)) for name, p in found.p_values.items()),
        ],
        columns=["evidence", "value"],
    )
    return Section(
        "Heads and pattern",
        f"The pattern is {found.pattern}: {found.reason}.",
        "A head is active if its share of the heads' output (standard deviation over prompts) is above "
        f"{Thresholds().share:.0%}, else it is a dummy. Active heads are positive or negative by the common sign of omega and mu. "
        "Heads of one sign make a kernel smoother; heads of both signs whose mu sum to zero and whose "
        "|omega| agree make one step of debiased gradient descent of size eta. Idealised heads keep omega and "
        "mu and lose the rest of their circuits; the closed form is the learner built from omega and mu alone. "
        "A p is the fraction of randomly initialised models of this shape that are as structured.",
        {"heads": found.plot()},
        {"pattern": numbers, "heads": found.to_frame()},
    )


def _component_rows(found: Classification) -> list[tuple[str, str]]:
    used = found.components
    if used is None:
        return []
    count = "–" if used.n_components is None else f"{used.n_components} of {len(used.learned)}"
    learned = ", ".join(_number(value) for value in used.learned)
    return [
        ("principal components used", count),
        ("learned part of each component", learned),
        ("share of E y² predicted off the components", _number(used.off_diagonal)),
    ]


def _circuits(checkpoint: Checkpoint) -> Section:
    found = circuits(checkpoint)
    return Section(
        "Circuits",
        "QK says how strongly a query's x looks at a key's x and y; OV says what is read from the tokens "
        "a head looks at. In the published pattern QK is omega times the identity on x, and OV is mu on y.",
        "QK = W_Q W_K^T times the softmax scale, OV = W_V W_O, from the weights alone. Rows of QK that belong "
        "to the query's empty y slot never act and are not drawn.",
        {"qk": found.plot(), "ov": found.plot_ov()},
    )


def _ablation(checkpoint: Checkpoint, found: Classification, n_prompts: int, seed: int) -> Section:
    task, dtype = checkpoint.config.task, checkpoint.weights.W_Q.dtype
    generator = generator_for(seed, "eval", 0)
    prompts = sample_prompts(task, n_prompts, generator=generator, dtype=dtype)
    single = [ablate_heads(checkpoint.model, prompts, method=method) for method in METHODS]
    pictures = {"ablation": _ablation_bars(single)}
    tables = {"ablation": pd.concat([one.to_frame() for one in single], ignore_index=True)}
    text = (
        f"Excess risk of the full model: {single[0].full_risk:.4f} ± {single[0].full_risk_sem:.4f} y². "
        "Each bar is its rise when one head is masked."
    )
    if {"positive", "negative"} <= set(found.labels):
        text += (
            " Masking one head of a ± pair does more than remove its share: the mu no longer sum to zero, so the "
            "mean response of the context, which the pair had cancelled, enters the prediction with the weight "
            "of the heads that stay. A large bar therefore does not mean that a head could do the task alone."
        )
    if checkpoint.config.model.n_heads <= MAX_SUBSET_HEADS:
        text += (
            " What heads do alone and together stands in the table of subsets; the Shapley values average over "
            "all orders of adding heads."
        )
        subsets = ablate_subsets(checkpoint, prompts)
        pictures["shapley"] = subsets.plot()
        tables |= {"shapley": subsets.shapley_frame(), "subsets": subsets.to_frame()}
    return Section(
        "Head ablation",
        text,
        f"Excess risk is the mean of (ŷ − x·β)² over {n_prompts} prompts, the same for every mask; ± is one "
        "standard error, paired over prompts. Zero ablation sets a head's z to 0, mean ablation to its mean "
        "over prompts, by hooks on hook_z. In one layer heads add up, so all subsets follow from one pass.",
        pictures,
        tables,
    )


def _ablation_bars(single: list[HeadAblation]) -> go.Figure:
    """One group of bars per head: zero beside mean ablation."""
    return figures.bars(
        single[0].head_names,
        {f"{one.method} ablation": one.rise.ravel() for one in single},
        errors={f"{one.method} ablation": one.rise_sem.ravel() for one in single},
        title="Rise of the excess risk when a head is masked",
        y_title="rise of excess risk (y²)",
    )


def _fits(fits: LearnerFits, found: Classification) -> Section:
    at_trained = fits.to_frame().query(f"context_length == {fits.trained_length}")
    text = fits.verdict
    if found.scales.eta_optimal == found.scales.eta_optimal:  # not NaN
        text += f" The best debiased step size for this task is {found.scales.eta_optimal:.4f}."
    return Section(
        "Which learner",
        text,
        f"At each context length, {fits.n_prompts} prompts shared by the model and all learners. Step sizes and "
        "the kernel head are fitted to the model's predictions by least squares; ridge is the Bayes predictor "
        "of the task, with nothing fitted. Loss alone does not tell: two learners can have "
        "equal losses and differ on every prompt.",
        {"fit_loss": fits.plot(), "fit_distance": fits.plot_distance()},
        {"fits_at_trained_length": at_trained, "fits": fits.to_frame()},
    )


def _training(checkpoint: Checkpoint) -> list[Section]:
    if checkpoint.history is None:
        return []
    dynamics = training_dynamics(checkpoint.history)
    train = checkpoint.config.train
    prompts = (
        f"{train.n_eval_prompts} fixed prompts" if train.optimizer == "adam" else "the population"
    )
    section = Section(
        "Training",
        f"{checkpoint.step} steps; final loss on {prompts} {dynamics.eval_loss[-1]:.4f} y².",
        _training_method(train),
        {"omega": dynamics.plot(), "mu": dynamics.plot_mu(), "loss": dynamics.plot_loss()},
        {"history": dynamics.to_frame()},
    )
    return [section]


def _training_method(train: TrainConfig) -> str:
    rows = f"a row every {train.log_every} steps"
    if train.optimizer == "adam":
        return (
            f"Adam, step size {train.learning_rate:g}, {train.batch_size} fresh prompts a step; {rows}. loss is the "
            "mean since the row before, eval_loss is on prompts training never sees."
        )
    how = {
        "gradient_flow": "Exact gradient flow on the population, as long as descent of",
        "gradient_descent": "Full-batch gradient descent of",
    }[train.optimizer]
    return (
        f"{how} step size {train.learning_rate:g}; {rows}. loss is that of the data trained on at the step itself, "
        "eval_loss that of the population; both are exact."
    )


def _render(checkpoint: Checkpoint, verdict: str, sections: list[Section]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = _figure_html
    environment.filters["number"] = _number
    return environment.get_template("page.html.jinja").render(
        name=checkpoint.name,
        verdict=verdict,
        config=checkpoint.config,
        step=checkpoint.step,
        sections=sections,
        longest_table=LONGEST_TABLE,
        plotly_js=get_plotlyjs(),
    )


def _figure_html(figure: go.Figure, name: str) -> str:
    return figure.to_html(
        full_html=False, include_plotlyjs=False, div_id=f"figure-{name}", config=FIGURE_OPTIONS
    )


def _number(value: object) -> str:
    """Four digits; a dash for NaN, and 0 for what is 0 but for rounding."""
    if not isinstance(value, float | np.floating):
        return str(value)
    value = float(value)
    if np.isnan(value):
        return "–"
    return "0" if abs(value) < 1e-12 else f"{value:.4g}"
