"""A report on one checkpoint: one HTML page that opens offline, and the CSV files behind it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from mechinterp.analysis.result import Finding
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.atomic import write_new, writing
from mechinterp.checkpoints.io.locks import claimed, entries, settle
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.icl.prompts import Prompts
from mechinterp.paper import all_drawn, require_format
from mechinterp.progress import ProgressCallback, no_progress
from mechinterp.report import to_html
from mechinterp.report.contents import contents_of
from mechinterp.report.parts import Section

PAGE = "index.html"
FIGURE_OPTIONS = {"responsive": True, "displaylogo": False}


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
    checkpoint: Checkpoint | HookedModule,
    out: str | Path,
    *,
    prompts: Prompts | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    analyses: Sequence[str | Callable[..., Finding]] | None = None,
    overwrite: bool = False,
    figures: str = "",
    progress: ProgressCallback = no_progress,
) -> Report:
    """Write `out/index.html` and the CSV files behind it, of a checkpoint or of what `hook_module` gives.

    It renders what `run_analysis` gives of each analysis: of one layer of attention the pattern, circuits and the learner
    it comes closest to, of any other model what masking, pruning and probing say.

    Args:
        analyses: Those that get a section, each a name in `ANALYSES`, `module:function`, or a function of your own;
            None: those that suit the model.
        prompts: Given prompts, such as `Prompts.from_arrays` makes; None: they are drawn.
        n_prompts: Evaluation prompts; None: as many as each analysis takes by itself. Either way the page's numbers are
            those of the commands. What takes fewer by itself, since it needs many runs, takes no more, and models
            of several layers take no fewer than probes need; the page says how many.
        figures: "pdf", "svg" or "png": every figure is also a file for print beside the page, as `save_figure` writes it.
        progress: Optional progress callback.
    Raises:
        ValueError: If `out` is a file, or a folder that holds anything and `overwrite` is not set, or n_prompts is
            too small for the model, or an analysis that was asked for is none or does not take the model.
    Example:
        >>> import tempfile
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = write_report(load("checkpoints/softmax-h1-s0"), folder, n_prompts=256)
        ...     report.page.name
        'index.html'
    """
    if not hasattr(checkpoint, "in_words"):
        raise ValueError(f"write_report needs a checkpoint, got a {type(checkpoint).__name__}.")
    require_free(Path(out), overwrite)
    if figures:
        require_format(Path(f"figure.{figures}"))
    verdict, loss, sections = contents_of(
        checkpoint,
        prompts=prompts,
        n_prompts=n_prompts,
        seed=seed,
        analyses=analyses,
        progress=progress,
    )
    return write_page(
        Path(out),
        checkpoint.name,
        checkpoint.in_words,
        verdict,
        sections,
        loss=loss,
        overwrite=overwrite,
        figures=figures,
    )


def require_free(out: Path, overwrite: bool) -> None:
    """Refuse a folder for a report that is there.

    Raises:
        ValueError: If `out` is a file, or a folder that holds anything; with `overwrite`, anything but a report.
    """
    settle(out)
    files, is_other = entries(out), os.path.lexists(out) and not out.is_dir()
    if not overwrite and (files or is_other):
        raise ValueError(
            f"{out}: already exists and is not overwritten; choose another --out, or --overwrite."
        )
    if files and not to_html.files_of(out / PAGE):
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
    """Write the sections as a page, and their tables.

    Args:
        loss: A line below the verdict.
        figures: Ending of files with the figures; none are written if left out.
        overwrite: Whether a report that is there is replaced.
    Raises:
        CheckpointError: If another file is in the way, or the folder cannot be written.
    """
    frames = {f"{n}.csv": table.frame for part in parts for n, table in part.tables.items()}
    shown = {name: figure for section in parts for name, figure in section.figures.items()}
    pictures = all_drawn(shown, figures) if figures else {}
    replaced = to_html.files_of(out / PAGE) if overwrite else frozenset()
    names = {*frames, *pictures, PAGE} if replaced else None
    files = sorted({*frames, *pictures, *replaced, PAGE})
    text = to_html.page(name, about, verdict, parts, files=files, loss=loss)
    with writing(out), claimed(out, last=PAGE, names=names, replaced=replaced) as claim:
        for file, frame in frames.items():
            claim.write(file, partial(frame.to_csv, index=False))
        for file, picture in pictures.items():
            claim.write(file, partial(Path.write_bytes, data=picture))
        claim.write(PAGE, lambda file: file.write_text(text, encoding="utf-8"))
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
    title = escape(str(figure.layout.title.text or file.stem))
    text = figure.to_html(include_plotlyjs=True, config=FIGURE_OPTIONS)
    text = text.replace("<head>", f"<head><title>{title} · mechinterp</title>", 1)
    with writing(file):
        write_new(file, lambda target: target.write_text(text, encoding="utf-8"))
