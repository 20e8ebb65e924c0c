"""Terminal output: tables, texts and progress bars."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from mechinterp.analysis.analyses import Finding
from mechinterp.analysis.circuits.patterns import Classification
from mechinterp.analysis.heads.fine_tuning import FineTuning
from mechinterp.analysis.heads.masking import Ablations
from mechinterp.analysis.heads.pruning import Pruning
from mechinterp.analysis.heads.subsets import MAX_SUBSET_HEADS
from mechinterp.analysis.learners.fits import LearnerFits
from mechinterp.analysis.learners.layered import LayeredClassification
from mechinterp.analysis.probing.probing import Probing
from mechinterp.checkpoints.errors import printable
from mechinterp.progress import Item, ProgressCallback
from mechinterp.training.run import Progress


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A bar on standard error with steps per second and the time left; gives the `on_log` of a training.

    Args:
        quiet: Whether nothing is shown.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Bar(*columns, console=Console(stderr=True), disable=quiet, redirect_stdout=_shown())

    def show(progress: Progress) -> None:
        if not bar.tasks:
            bar.start()
            bar.add_task("")
        left = timedelta(seconds=round(progress.seconds_left))
        models = f"{progress.n_models} model{'s' if progress.n_models > 1 else ''}"
        text = f"{models}, loss {progress.loss:.4f}, {progress.steps_per_second:.0f} steps/s, {left} left"
        bar.update(bar.task_ids[0], completed=progress.step, total=progress.steps, description=text)
        for name in progress.diverged:
            bar.console.print(
                f"{printable(name)} has diverged: its loss is not finite at step {progress.step}",
                markup=False,
            )

    try:
        yield show
    finally:
        if bar.tasks:
            bar.stop()


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[ProgressCallback]:
    """A bar on standard error for each loop of an analysis, with the time left; gone when the analysis is done.

    Args:
        quiet: Whether nothing is shown; nor is it where standard error is no terminal.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal

    bar = Bar(*columns, console=console, transient=True, disable=hidden, redirect_stdout=_shown())
    with bar:

        def progress(items: Sequence[Item], text: str) -> Iterable[Item]:
            task = bar.add_task(text, total=len(items))
            try:
                yield from bar.track(items, task_id=task)
            finally:
                bar.remove_task(task)

        yield progress


def _shown() -> bool:
    """Whether what is printed meets the bar, and must go above it; into a file or a pipe it goes as it is."""
    return sys.stdout.isatty()


def frame_text(frame: pd.DataFrame) -> str:
    """A table in columns, numbers with four digits."""
    return frame.to_string(index=False, float_format=lambda value: f"{value:.4g}")


def fits_text(fits: LearnerFits) -> str:
    """The verdict, the fits at the trained context length, and R^2 over all lengths."""
    frame = fits.to_frame()
    trained = frame[frame["context_length"] == fits.trained_length]
    columns = ["learner", "factor", "factor_sem", "r2", "r2_sem", "rms", "rms_sem"]
    columns += ["loss", "loss_gap", "loss_gap_sem"]
    over_length = frame.pivot(index="context_length", columns="learner", values="r2")
    return "\n".join(
        (
            fits.verdict,
            f"\nFits at L = {fits.trained_length}; loss_gap is the model's loss minus the learner's",
            frame_text(trained[columns]),
            "\nR² over context length",
            frame_text(over_length[trained["learner"]].rename_axis(None, axis=1).reset_index()),
        )
    )


def ablation_text(found: Ablations) -> str:
    """Excess risk, its rise for every masked head, how a layer spreads it, and subsets of heads if there are any."""
    zero, subsets = found.methods[0], found.subsets
    parts = [f"excess risk {zero.full_risk:.4f} ± {zero.full_risk_sem:.4f} y²"]
    if zero.breaking:
        parts.append(
            f"Without {', '.join(zero.breaking)} it is worse than predicting 0 ({zero.null_risk:.4g})."
        )
    for one in found.methods:
        if one.carried:
            parts.append(
                f"One prompt in a hundred carries most of the mean rise of {', '.join(one.carried)} ({one.method} ablation): "
                "read the median."
            )
    parts += ["\nRise when one head is masked", frame_text(found.to_frame())]
    parts += ["\nHow a layer spreads it over its heads", frame_text(found.layer_frame())]
    if subsets is None:
        parts.append(
            f"\nSubsets are left out: they are of one layer of attention with at most {MAX_SUBSET_HEADS} heads."
        )
    else:
        parts += [
            "\nShapley values: fall of the excess risk a head brings",
            frame_text(subsets.shapley_frame()),
        ]
        parts += ["\nEvery subset of heads kept", frame_text(subsets.to_frame())]
    return "\n".join(parts)


def pruning_text(found: Pruning, tuned: FineTuning | None = None) -> str:
    """What is kept, what it costs and what further training wins back."""
    n_layers, n_heads = found.kept.shape
    kept = f"heads kept in layers 0 to {n_layers - 1}: {', '.join(map(str, found.kept.sum(1)))} of {n_heads}"
    as_is = (
        f"  excess risk {found.full_risk:.4g} ± {found.full_risk_sem:.2g} y² with all heads, {found.risk:.4g} ± "
        f"{found.risk_sem:.2g} with these: {found.ratio:.3g} ± {found.ratio_sem:.2g} times"
    )
    refit = f"  with a new read-out {found.refit_ratio:.3g} ± {found.refit_ratio_sem:.2g} times"
    parts = [kept, as_is, refit]
    if found.carried_by_few:
        said = "  One prompt in a hundred carries most of this risk: read the number with a new read-out."
        parts = [kept, refit, as_is, said]
    parts.append(
        "  (heads chosen on random halves of the prompts, risks measured on the other halves, ± over prompts and choices)"
    )
    if tuned is not None:
        few, full = (
            f"{r:.3g} ± {s:.2g}"
            for r, s in zip(tuned.ratio[:, -1], tuned.ratio_sem[:, -1], strict=True)
        )
        parts.append(
            f"  after {tuned.step[-1]} steps of further training {few} times (all heads, trained as long: {full})"
        )
    parts.append("kept: chosen on all prompts; chosen: in which share of the halves")
    parts.append(frame_text(found.to_frame()))
    return "\n".join(parts)


def classification_text(found: Classification | LayeredClassification) -> str:
    """The pattern, why it is that one, and the table of heads."""
    return f"{found.pattern} ({found.reason})\n{frame_text(found.to_frame())}"


def probing_text(found: Probing) -> str:
    """A table for each target of the probes, and one for descent."""
    structures = found.structure_frames()
    tables = {
        "the response, read from the stream at the query": found.response.to_frame(),
        "\nThe covariates times the context's correlations with y (Algorithm 1)": structures[
            "reweighted x"
        ],
        "\nThe covariates times the context's covariance, less themselves": structures[
            "preconditioned x"
        ],
        "\nGradient descent on the features after layer 0, and on x": found.descent.area_frame(),
    }
    return "\n".join(f"{title}\n{frame_text(frame)}" for title, frame in tables.items())


BESPOKE: dict[type, Callable[..., str]] = {
    Classification: classification_text,
    LayeredClassification: classification_text,
    Ablations: ablation_text,
    LearnerFits: fits_text,
    Pruning: pruning_text,
    Probing: probing_text,
}
"""Results of several tables, or with a sentence of their own."""


def result_text(found: Finding) -> str:
    """A result as text: what it comes to, and its table."""
    if type(found) in BESPOKE:
        return BESPOKE[type(found)](found)
    return f"{found!r}\n{frame_text(found.to_frame())}"


def info_text(document: dict) -> str:
    """The document of `info`, readable."""
    task, model = document["experiment"]["task"], document["experiment"]["model"]
    layers = (
        f"{model['n_layers']} layers of " if model["n_layers"] > 1 or model["context_only"] else ""
    )
    lines = [
        f"{document['name']}: {layers}{model['n_heads']} heads, {model['score']} attention, d_x {task['d_x']}, "
        f"context length {task['context_length']}"
    ]
    assumed = set(document["assumed"])
    if "step" not in assumed:
        lines[0] += f", step {document['step']}, config {document['id']}"
    if document["origin"]:
        said = (f"{name.replace('_', ' ')} {value}" for name, value in document["origin"].items())
        lines.append(f"  origin: {', '.join(said)}")
    for name in ("eval_loss", "history_rows", "snapshots", "weights"):
        lines.append(f"  {name}: {document[name]}")
    for group, values in document["experiment"].items():
        if group in ("train", "seed") and "step" in assumed:
            continue  # how external weights were trained is not known
        fields = values.items() if isinstance(values, dict) else [("", values)]
        lines.append(
            f"  {group}: " + ", ".join(f"{name} {value}".strip() for name, value in fields)
        )
    lines.append("  hooks (name, shape, what turns it on):")
    for hook in document["hooks"]:
        shape = f"[{', '.join(map(str, hook['shape']))}]"
        lines.append(f"    {hook['name']:<31} {shape:<22} {hook['switch']}".rstrip())
    return "\n".join(lines)
