"""A report on one checkpoint: one HTML page that opens offline, and the CSV files behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import pandas as pd
import plotly.graph_objects as go
import torch

from mechinterp.analysis.fits import LearnerFits, fit_learners
from mechinterp.analysis.heads import ablate_heads
from mechinterp.analysis.patterns import Classification, classify_attention
from mechinterp.analysis.subsets import MAX_SUBSET_HEADS, ablate_subsets
from mechinterp.checkpoints.files import write_atomically
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.icl.prompts import sample_prompts
from mechinterp.report import html, sections
from mechinterp.report.sections import Section
from mechinterp.report.training import training_sections
from mechinterp.tracking import Track, untracked

PAGE = "index.html"
METHODS = ("zero", "mean")
FIGURE_OPTIONS = {"responsive": True, "displaylogo": False}


@runtime_checkable
class Result(Protocol):
    """What every analysis gives back."""

    def to_frame(self) -> pd.DataFrame: ...

    def plot(self) -> go.Figure: ...


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
    track: Track = untracked,
) -> Report:
    """Write `out/index.html` and the CSV files behind it.

    Args:
        n_prompts: Prompts behind the ablations; the fits take five times as many per context length.
        track: Told of the progress.
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
    require_free(Path(out), overwrite)
    found = classify_attention(checkpoint, n_prompts=n_prompts, seed=seed)
    fits = fit_learners(checkpoint, n_prompts=5 * n_prompts, seed=seed, track=track)
    config, model = checkpoint.config, checkpoint.config.model
    prompts = sample_prompts(config.task, n_prompts, seed=seed, dtype=checkpoint.weights.dtype)
    single = [ablate_heads(checkpoint, prompts, method=method, track=track) for method in METHODS]
    few = model.n_heads <= MAX_SUBSET_HEADS
    subsets = ablate_subsets(checkpoint, prompts) if few else None
    with torch.no_grad():
        error = checkpoint.predictor.predict(prompts) - prompts.y_query_clean
    parts = [
        sections.heads_section(found, model.score, single, subsets),
        sections.circuits_section(checkpoint),
        sections.attention_section(checkpoint, prompts, error.square().mean(1).numpy()),
        sections.ablation_section(found, model.score, single, subsets, n_prompts),
        sections.fits_section(fits, found),
        *training_sections(checkpoint, seed=seed, track=track),
    ]
    about = (
        f"{model.n_heads} heads, {model.score} attention, d_x {config.task.d_x}, context length "
        f"{config.task.context_length}, noise variance {config.task.noise_var}"
    )
    if "step" in checkpoint.assumed:
        about += sections.assumed_text(checkpoint.assumed)
    else:
        about += f", seed {config.seed}, step {checkpoint.step}, config {config.id}"
    verdict = verdict_sentence(checkpoint.name, found, fits)
    return write_page(Path(out), checkpoint.name, about, verdict, parts)


def require_free(out: Path, overwrite: bool) -> None:
    """Refuse a folder for a report that is there.

    Raises:
        ValueError: If `out` is a file, or a folder that holds anything and `overwrite` is not set.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise ValueError(
            f"{out}: already exists and is not overwritten; choose another --out, or --overwrite."
        )


def write_page(out: Path, name: str, about: str, verdict: str, parts: Sequence[Section]) -> Report:
    """Write the sections as a page, and their tables."""
    tables = []
    for table, frame in [table for section in parts for table in section.tables.items()]:
        tables.append(out / f"{table}.csv")
        write_atomically(tables[-1], partial(frame.to_csv, index=False))
    text = html.page(name, about, verdict, parts)
    write_atomically(out / PAGE, lambda file: file.write_text(text, encoding="utf-8"))
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
