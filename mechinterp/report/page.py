"""A report on one checkpoint: one HTML page that opens offline, and the CSV files behind it."""

import os
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
from mechinterp.analysis.patterns import Classification, classify
from mechinterp.analysis.subsets import MAX_SUBSET_HEADS, ablate_subsets
from mechinterp.checkpoints.claims import claimed, entries, settle
from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.files import write_new
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.functional import predict
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
    fits = fit_learners(checkpoint, n_prompts=5 * n_prompts, seed=seed, track=track)
    found = classify(checkpoint, n_prompts=n_prompts, seed=seed)
    config, model = checkpoint.config, checkpoint.config.model
    generator = generator_for(seed, "eval", 0)
    dtype = checkpoint.weights.W_Q.dtype
    prompts = sample_prompts(config.task, n_prompts, generator=generator, dtype=dtype)
    single = [
        ablate_heads(checkpoint.model, prompts, method=method, track=track) for method in METHODS
    ]
    few = model.n_heads <= MAX_SUBSET_HEADS
    subsets = ablate_subsets(checkpoint, prompts) if few else None
    with torch.no_grad():
        error = predict(checkpoint.weights, prompts) - prompts.y_query_clean
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
    return write_page(Path(out), checkpoint.name, about, verdict, parts, overwrite=overwrite)


def require_free(out: Path, overwrite: bool) -> None:
    """Refuse a folder for a report that is there.

    Raises:
        ValueError: If `out` is a file, or a folder that holds anything; with `overwrite`, anything but a report.
    """
    settle(out)
    found = entries(out)
    if not overwrite and (found or (os.path.lexists(out) and not out.is_dir())):
        raise ValueError(
            f"{out}: already exists and is not overwritten; choose another --out, or --overwrite."
        )
    if found and not html.files_of(out / PAGE):
        raise ValueError(
            f"{out}: already holds {found[0]} and no report of this version; it is not overwritten."
        )
    if os.path.lexists(out) and not out.is_dir():
        raise ValueError(f"{out}: already exists and is not overwritten, not being a folder.")


def write_page(
    out: Path,
    name: str,
    about: str,
    verdict: str,
    parts: Sequence[Section],
    *,
    overwrite: bool = False,
) -> Report:
    """Write the sections as a page, and their tables.

    Args:
        overwrite: Whether a report that is there is replaced.
    Raises:
        CheckpointError: If another file is in the way, or the folder cannot be written.
    """
    frames = {f"{table}.csv": frame for section in parts for table, frame in section.tables.items()}
    replaced = html.files_of(out / PAGE) if overwrite else frozenset()
    names = {*frames, PAGE} if replaced else None
    files = sorted({*frames, *replaced, PAGE})
    text = html.page(name, about, verdict, parts, files=files)
    try:
        with claimed(out, last=PAGE, names=names, replaced=replaced) as claim:
            for file, frame in frames.items():
                claim.write(file, partial(frame.to_csv, index=False))
            claim.write(PAGE, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({one_line(error)}).") from None
    return Report(out / PAGE, tuple(out / file for file in frames), verdict)


def write_figure(file: Path, figure: go.Figure) -> None:
    """Write one figure as an HTML page that opens offline.

    Raises:
        ValueError: If the file exists or does not end in .html.
    """
    if file.suffix != ".html":
        raise ValueError(f"{file}: must end in .html.")
    if os.path.lexists(file):
        raise ValueError(f"{file}: already exists; it is not overwritten.")
    text = figure.to_html(include_plotlyjs=True, config=FIGURE_OPTIONS)
    try:
        write_new(file, lambda target: target.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({one_line(error)}).") from None


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
