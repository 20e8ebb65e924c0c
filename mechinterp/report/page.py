"""Report on one checkpoint, or on several side by side: an HTML page that opens offline with a verdict and sections,
and its CSV files.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import plotly.graph_objects as go

from mechinterp.analysis.comparison import compare
from mechinterp.analysis.registry import Analysis
from mechinterp.analysis.result import Finding, Table
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.files import printable, write_new, writing
from mechinterp.checkpoints.io.locks import claimed, entries, settle
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.config import TaskLike
from mechinterp.display import counted
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.ways import predictions_kept
from mechinterp.paper import all_drawn, require_format
from mechinterp.report import to_html
from mechinterp.report.sections import contents_of, section_of
from mechinterp.report.to_csv import write_csv
from mechinterp.report.to_html import Section

PAGE_FILE = "index.html"
DEFAULT_NUMBER = 4096
"""Default number of prompts for each label of a comparison; losses use five times as many."""
FIGURE_OPTIONS = {"responsive": True, "displaylogo": False}


@dataclass(frozen=True)
class Report:
    """Result of writing a report: paths of the page and tables, and the verdict."""

    page: Path
    tables: tuple[Path, ...]
    verdict: str

    def to_document(self) -> dict:
        """The report's fields as a JSON document."""
        tables = [str(table) for table in self.tables]
        return {"page": str(self.page), "tables": tables, "verdict": self.verdict}


def write_report(
    checkpoint: Checkpoint | HookedModule | Sequence[Checkpoint],
    out: str | Path,
    *,
    prompts: Prompts | None = None,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    analyses: Sequence[str | Callable[..., Finding]] | None = None,
    left_out: Mapping[str, str] | None = None,
    overwrite: bool = False,
    figures: str = "",
) -> Report:
    """Write `out/index.html` and its CSV files, with the results of `run_analysis`.

    Args:
        checkpoint: A checkpoint or a module from `hook_module`; several checkpoints of one layer of attention are compared.
        analyses: Analyses to show: names in `ANALYSES`, "module:function", or functions; None: those that suit the
            model.
        prompts: Given prompts, for example from `Prompts.from_arrays`; None: prompts are drawn.
        task: Law of the prompts; None: that of the model; "unknown": given prompts have no known law.
        n_prompts: Number of evaluation prompts; None: each analysis uses its default. The numbers equal those of the
            commands. Slow analyses never use more than their default, and models with several layers use at
            least the number that probes need; the page states the number.
        left_out: Paths that could not be compared, with the reason, to be listed on the page.
        figures: "pdf", "svg" or "png": also write every figure to a file, as `save_figure` does.
    Raises:
        ValueError: If `out` is a file or a nonempty folder without `overwrite`, n_prompts is too small for the model, or
            an analysis does not exist or does not take the model. Also if there is no checkpoint, or prompts or
            analyses are given for several.
    See also:
        `classify`, `save_figure`.
    Example:
        >>> import tempfile
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> models = [load(f"checkpoints/softmax-h1-s{seed}") for seed in (0, 1)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report(models[0], f"{folder}/one", analyses=["circuits"]).page.name
        ...     write_report(models, f"{folder}/both", n_prompts=64).verdict
        'index.html'
        '2 models of 1 setting: softmax-h1: kernel_regression 2.'
    """
    out = Path(out)
    require_free_folder(out, overwrite)
    if figures:
        require_format(Path(f"figure.{figures}"))
    if isinstance(checkpoint, Sequence):
        _require_none({"analyses": analyses, "prompts": prompts, "task": task}, len(checkpoint))
        contents = _comparison(checkpoint, out, left_out or {}, n_prompts, seed)
    elif not hasattr(checkpoint, "in_words"):
        raise ValueError(f"write_report needs a checkpoint, got a {type(checkpoint).__name__}.")
    else:
        with predictions_kept():
            of_one = contents_of(checkpoint, prompts, n_prompts, seed, analyses, task)
        contents = (checkpoint.name, checkpoint.in_words, *of_one)
    name, about, verdict, loss, sections = contents
    return write_page(
        out, name, about, verdict, sections, loss=loss, overwrite=overwrite, figures=figures
    )


def _require_none(options: Mapping[str, object], n_models: int) -> None:
    """Refuse options of a page about one model."""
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} need one checkpoint, got {n_models}.")


def _comparison(
    checkpoints: Sequence[Checkpoint],
    out: Path,
    left_out: Mapping[str, str],
    n_prompts: int | None,
    seed: int,
) -> tuple[str, str, str, str, list[Section]]:
    """Title of a page on several models, their names, the verdict, no loss, and sections with links to reports beside
    the page."""
    models = sorted(checkpoints, key=lambda each: natural(each.name))
    number = DEFAULT_NUMBER if n_prompts is None else n_prompts
    found = compare(models, n_prompts=number, seed=seed)
    beside = out.resolve().parent
    links = {
        each.name: f"../{quote(each.name)}/{PAGE_FILE}"
        for each in models
        if to_html.files_of(beside / each.name / PAGE_FILE)
    }
    analysis, verdict = Analysis(compare, title="Settings and models"), found.verdict
    prompts = f"{number} prompts for each label and {5 * number} for each loss, seed {seed}."
    section = section_of("comparison", analysis, found, shown=[verdict], prompts=prompts)
    sections = [replace(section, links=links, unfolded=True)]
    if left_out:
        sections.append(_left_out(left_out))
        verdict += f" Left out: {len(left_out)} of {len(left_out) + len(models)}."
    title = f"Comparison of {counted(len(models), 'model')}"
    return title, ", ".join(each.name for each in models), verdict, "", sections


def natural(name: str) -> list[Any]:
    """Sort key of names, which puts s2 before s10.

    Example:
        >>> sorted(["s10", "s2", "s1"], key=natural)
        ['s1', 's2', 's10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _left_out(reasons: Mapping[str, str]) -> Section:
    rows = [
        (printable(path), printable(reason).removeprefix(f"{printable(path)}: "))
        for path, reason in reasons.items()
    ]
    return Section(
        "Left out",
        "Asked for, and not in this comparison.",
        "Each file is read by itself; one that fails leaves the others as they are.",
        tables={"left_out": Table(pd.DataFrame(rows, columns=["checkpoint", "error"]))},
        unfolded=True,
    )


def require_free_folder(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that must not be overwritten.

    Raises:
        ValueError: If `out` is a file or a nonempty folder; with `overwrite`, if it is not a report.
    """
    settle(out)
    files, is_other = entries(out), os.path.lexists(out) and not out.is_dir()
    if not overwrite and (files or is_other):
        raise ValueError(
            f"{out}: already exists and is not overwritten; choose another --out, or --overwrite."
        )
    if files and not to_html.files_of(out / PAGE_FILE):
        raise ValueError(
            f"{out}: already holds {files[0]} and no report of this version; it is not overwritten."
        )
    if is_other:
        raise ValueError(f"{out}: already exists and is not overwritten, not being a folder.")


def write_page(
    out: Path,
    name: str,
    about: str,
    verdict: str,
    parts: Sequence[Section],
    *,
    loss: str = "",
    overwrite: bool = False,
    figures: str = "",
) -> Report:
    """Write the sections as a page, and their tables as CSV files.

    Args:
        loss: Line below the verdict.
        figures: File ending of separate figure files; "": none.
        overwrite: True: replace an existing report.
    Raises:
        CheckpointError: If another file is in the way, or the folder cannot be written.
    """
    frames = {f"{n}.csv": table.frame for part in parts for n, table in part.tables.items()}
    shown = {name: figure for section in parts for name, figure in section.figures.items()}
    pictures = all_drawn(shown, figures) if figures else {}
    replaced = to_html.files_of(out / PAGE_FILE) if overwrite else frozenset()
    names = {*frames, *pictures, PAGE_FILE} if replaced else None
    files = sorted({*frames, *pictures, *replaced, PAGE_FILE})
    text = to_html.page(name, about, verdict, parts, files=files, loss=loss)
    with claimed(out, last=PAGE_FILE, names=names, replaced=replaced) as claim:
        for file, frame in frames.items():
            claim.write(file, partial(write_csv, frame))
        for file, picture in pictures.items():
            claim.write(file, partial(Path.write_bytes, data=picture))
        claim.write(PAGE_FILE, lambda file: file.write_text(text, encoding="utf-8"))
    return Report(out / PAGE_FILE, tuple(out / file for file in frames), verdict)


def write_figure(file: Path, figure: go.Figure) -> None:
    """Write one figure as an HTML page that opens offline.

    Raises:
        ValueError: If the file exists or does not end in .html.
    """
    if file.suffix != ".html":
        raise ValueError(f"{file}: must end in .html.")
    if os.path.lexists(file):
        raise ValueError(f"{file}: already exists; it is not overwritten.")
    title = escape(str(figure.layout.title.text or file.stem))
    text = figure.to_html(include_plotlyjs=True, config=FIGURE_OPTIONS)
    text = text.replace("<head>", f"<head><title>{title} · mechinterp</title>", 1)
    with writing(file):
        write_new(file, lambda target: target.write_text(text, encoding="utf-8"))
