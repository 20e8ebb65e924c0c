"""Commands that describe checkpoints: argument parsing only."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mechinterp.cli.files import Files
from mechinterp.cli.options import (
    CountOption,
    JsonOption,
    PathArgument,
    PathsArgument,
    PromptsOption,
    QuietOption,
    Request,
    SeedOption,
    option,
    prompts_of,
    reads_files,
)
from mechinterp.cli.own_model import require_file, require_model
from mechinterp.cli.printing import about_paths, answer, complain, say, say_json, say_of, shown_path

if TYPE_CHECKING:
    from mechinterp.analysis.classified import Classified
    from mechinterp.checkpoints.checkpoint import Checkpoint
    from mechinterp.checkpoints.modules.hooked import HookedModule


@reads_files(device=True, request=True)
def classify(
    paths: PathsArgument,
    out: Annotated[
        Path | None, option("--out", "New table, .parquet or .csv, with one row per checkpoint.")
    ] = None,
    *,
    request: Request,
    files: Files,
) -> None:
    """State what a model computes, and how certain that is. Example: mechinterp classify
    checkpoints/*"""
    from mechinterp.analysis.comparison import model_row
    from mechinterp.checkpoints.io.files import NotUnderstoodError
    from mechinterp.checkpoints.paths import checkpoint_paths, runs_among
    from mechinterp.progress import progress
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.to_csv import require_writable, write_table
    from mechinterp.report.to_json import to_json

    if out is not None:
        require_writable(out)
    documents: list[dict] = []
    rows: list[dict[str, object]] = []
    groups = runs_among(checkpoint_paths(paths))
    all_paths = [path for group in groups for path in group]
    steps = _steps(groups, files, request.context_length)
    headers: set[str] = set()
    with progress_bars(quiet=request.quiet):
        for path in progress(all_paths, "classifying"):
            try:
                with about_paths(path, *request.files):
                    checkpoint, numbers, result = _classified(path, steps, request, files)
                    document = to_json("classify", checkpoint, result) | numbers | request.note
            except (ValueError, OSError) as error:
                unread = {"understood": False} if isinstance(error, NotUnderstoodError) else {}
                rows.append({"path": str(path), "error": str(error)})
                documents.append(rows[-1] | unread)
                complain(str(error))
                continue
            documents.append(document)
            rows.append(model_row(checkpoint, result) | numbers)
            if not request.as_json:
                _say_label(path, result, headers, alone=len(all_paths) == 1, wide=request.wide)
    if request.as_json:
        say_json(documents)
    if out is not None:
        write_table(out, rows)
    if any("error" in document for document in documents):
        raise typer.Exit(2)


Steps = Mapping[Path, tuple["Checkpoint", dict[str, float]]]
"""Model at each step of a run, with the step and its loss, by path."""


def _classified(
    path: Path, steps: Steps, request: Request, files: Files
) -> tuple["Checkpoint | HookedModule", dict[str, float], "Classified"]:
    """Model at a path, its step and loss if it is a step of a run, and its classification."""
    from mechinterp.analysis.registry import run_analysis

    checkpoint, numbers = steps.get(path) or (files.model(path, request.context_length), {})
    result = run_analysis("classify", checkpoint, task=files.law, **request.drawn_by)
    return checkpoint, numbers, cast("Classified", result)


def _say_label(
    path: Path, result: "Classified", headers: set[str], *, alone: bool, wide: bool
) -> None:
    """Print a classification: in full if it is the only one, else briefly.

    Args:
        headers: Headings of the heads that have been printed; that of this model is added.
    """
    from mechinterp.report.to_text import brief_text, classification_text

    if alone or wide:
        return say_of(path, classification_text(result, wide=wide))
    if result.heads_title not in headers:
        headers.add(result.heads_title)
        say(result.heads_title)
    say_of(path, brief_text(result))


def _steps(groups: Sequence[Sequence[Path]], files: Files, context_length: int | None) -> Steps:
    """Models of the paths that are steps of a run."""
    from mechinterp.checkpoints.paths import steps_of

    steps = {}
    for group in groups:
        run = files.run_of(group, context_length)
        if run is None or run.history is None:
            continue
        losses = run.history.drop_duplicates("step").set_index("step")
        for step, path in steps_of(group, one_run=True).items():
            numbers = {"step": step, "loss": losses["eval_loss"][step]}
            numbers["loss_sem"] = losses["eval_loss_sem"][step]
            steps[path] = replace(run.at(step), path=path), numbers
    return steps


@reads_files(device=True, request=True)
def check(
    path: PathArgument,
    *,
    request: Request,
    files: Files,
) -> None:
    """First look at a model: its loss, what is assumed, and which analyses run. Example: mechinterp check softmax-h2-s0"""
    from mechinterp.analysis.check import check as check_model
    from mechinterp.analysis.result import records
    from mechinterp.report.to_json import SCHEMA_VERSION

    with about_paths(path, *request.files):
        model = require_model(path, files.opened(path))
        if request.context_length is not None:
            model = model.at_length(request.context_length)
        drawn_by: dict = {
            "prompts": request.given,
            "n_prompts": request.n_prompts,
            "seed": request.seed,
        }
        given = {name: value for name, value in drawn_by.items() if value is not None}
        checked = check_model(model, task=files.law, **given)
    document = {
        "schema_version": SCHEMA_VERSION,
        "path": str(path),
        "model": checked.model,
        "loss": vars(checked.loss),
        "doubt": checked.doubt,
        "settings": records(checked.settings),
        "analyses": records(checked.analyses),
    }
    answer(document | request.note, str(checked), as_json=request.as_json)


@reads_files()
def info(
    path: PathArgument,
    as_json: JsonOption = False,
    wide: Annotated[bool, option("--wide", "Also list the hook points.")] = False,
    *,
    files: Files,
) -> None:
    """Show the main facts of a checkpoint. Example: mechinterp info checkpoints/softmax-h2-s0"""
    from mechinterp.checkpoints.native.folder import outline_of
    from mechinterp.report.info import info_document, info_text

    require_file(path, "info")
    hooks = as_json or wide
    outline = None if hooks or files.hints.given else outline_of(path)
    document = info_document(outline or files.load(path), hooks=hooks)
    answer(document, info_text(document), as_json=as_json)


@reads_files()
def convert(
    path: PathArgument,
    target: Annotated[str, option("--to", "native, transformer-lens or npz.")],
    out: Annotated[Path, option("--out", "New folder, or new file for npz.")],
    as_json: JsonOption = False,
    *,
    files: Files,
) -> None:
    """Write a checkpoint in another format. Example: mechinterp convert checkpoints/softmax-h2-s0 --to transformer-lens --out h2"""
    from mechinterp.checkpoints import load as loading
    from mechinterp.checkpoints.native.exchange import FORMAT, positions_for
    from mechinterp.report.to_json import header

    require_file(path, "convert")
    with about_paths(path, out):
        checkpoint = files.load(path)
        written = loading.convert(checkpoint, target, out)
    n_ctx = positions_for(checkpoint.config.task) if target == FORMAT else None
    parts = {"history": checkpoint.history is not None, "snapshots": bool(checkpoint.snapshots)}
    left_out = [part for part, stored in parts.items() if stored and target != "native"]
    about = {"to": target, "n_ctx": n_ctx, "left_out": left_out, "files": list(map(str, written))}
    names = ", ".join(str(file.relative_to(out)) for file in written if file != out) or "written"
    lines = [f"{shown_path(out)}: {names}"]
    if n_ctx is not None:
        lines.append(f"n_ctx is {n_ctx}; read load.py, then run it with transformer-lens 2 or 3.")
    if left_out:
        lines.append(f"Left out: {', '.join(left_out)}.")
    answer(header(checkpoint) | about, "\n".join(lines), as_json=as_json)


@reads_files(device=True)
def report(
    paths: PathsArgument,
    out: Annotated[Path, option("--out", "Folder for the page and its CSV files.")],
    prompts: PromptsOption = None,
    n_prompts: CountOption = None,
    seed: SeedOption = None,
    analyses: Annotated[
        list[str] | None,
        option(
            "--analysis",
            "An analysis to show, or my_module:my_function; repeatable; for one checkpoint only; default: all that suit the model.",
            metavar="NAME",
        ),
    ] = None,
    overwrite: Annotated[bool, option("--overwrite", "Replace an existing report.")] = False,
    figures: Annotated[
        str, option("--figures", "Also write each figure as a file: pdf, svg or png.")
    ] = "",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
    *,
    files: Files,
) -> None:
    """Write a report on a checkpoint, or on several side by side, as one HTML page. Example: mechinterp report checkpoints/softmax-h2-s0 --out reports/h2"""
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.page import write_report
    from mechinterp.report.text import wrapped

    with progress_bars(quiet=quiet):
        given = None if prompts is None else prompts_of(prompts)
        models, about = _models_of(paths, files)
        left_out = {each["path"]: each["error"] for each in about if "error" in each}
        named = (Path(about[0]["path"]),) if len(about) == 1 else ()
        with about_paths(*named, out):
            written = write_report(
                models,
                out,
                prompts=given,
                task=files.law,
                n_prompts=n_prompts,
                seed=seed or 0,
                analyses=analyses,
                left_out=left_out,
                overwrite=overwrite,
                figures=figures,
            )
    document = about[0] if len(about) == 1 else {"checkpoints": about}
    shown = f"{wrapped(written.verdict, '  ')}\nReport: {shown_path(written.page.resolve())}"
    answer(document | written.to_document(), shown, as_json=as_json)
    if left_out:
        raise typer.Exit(2)


def _models_of(
    paths: list[Path], files: Files
) -> tuple["Checkpoint | HookedModule | list[Checkpoint]", list[dict[str, str]]]:
    """The model, or the readable ones of several, where a run counts as one; and a JSON entry of every path with its
    error, if any."""
    from mechinterp.checkpoints.paths import checkpoint_paths, runs_among

    each: list[tuple[Path, Checkpoint | None]] = []
    for group in runs_among(checkpoint_paths(paths)):
        run = files.run_of(group)
        each += [(run.path, run)] if run else [(path, None) for path in group]
    if len(each) == 1:
        path, run = each[0]
        with about_paths(path):
            return run or files.model(path), [{"path": str(path)}]
    loaded, about = [], []
    for path, run in each:
        try:
            with about_paths(path):
                loaded.append(_compared(path, run, files))
            about.append({"path": str(path)})
        except (ValueError, OSError) as error:
            about.append({"path": str(path), "error": str(error)})
            complain(str(error))
    return loaded, about


def _compared(path: Path, run: "Checkpoint | None", files: Files) -> "Checkpoint":
    """Checkpoint of a page on several models.

    Raises:
        ValueError: If it is not a single layer of attention.
    """
    require_file(path, "a page on several models")
    checkpoint = run or files.load(path)
    if why := checkpoint.config.model.beyond_one_layer:
        raise ValueError(
            f"{checkpoint.path}: a comparison needs models of one layer of attention without other parts, "
            f"got {why}; make a report on this model alone."
        )
    return checkpoint
