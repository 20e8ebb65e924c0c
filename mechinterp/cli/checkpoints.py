"""Commands that describe checkpoints: argument parsing only."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from mechinterp.cli.options import (
    Asked,
    CountOption,
    Files,
    JsonOption,
    PathArgument,
    PromptsOption,
    QuietOption,
    SeedOption,
    about_paths,
    answer,
    argument,
    asks_checkpoints,
    complain,
    option,
    prompts_of,
    reads_checkpoints,
    runs_checkpoints,
    say,
    say_json,
    say_of,
    shown_path,
)

if TYPE_CHECKING:
    from mechinterp.analysis.classified import Classified
    from mechinterp.checkpoints.checkpoint import Checkpoint
    from mechinterp.checkpoints.foreign.options import Hints
    from mechinterp.report.page import Report


@asks_checkpoints
def classify(
    paths: Annotated[list[Path], argument("PATH...", "Checkpoints, or folders of them.")],
    out: Annotated[
        Path | None, option("--out", "New table, .parquet or .csv, with one row per checkpoint.")
    ] = None,
    *,
    asked: Asked,
    files: Files,
) -> None:
    """State what a model computes, and how certain that is. Example: mechinterp classify
    checkpoints/*"""
    from mechinterp.analysis.registry import run_analysis
    from mechinterp.checkpoints.io.errors import NotUnderstoodError
    from mechinterp.checkpoints.load import checkpoint_paths, runs_among
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.to_csv import require_writable, write_table
    from mechinterp.report.to_json import to_json
    from mechinterp.report.to_text import brief_text, classification_text

    if out is not None:
        require_writable(out)
    documents: list[dict] = []
    groups = runs_among(checkpoint_paths(paths))
    all_paths = [path for group in groups for path in group]
    length, wide = asked.context_length, asked.wide
    steps = _steps(groups, files, length)
    headers: set[str] = set()
    with progress_bars(quiet=asked.quiet) as progress:
        for path in progress(all_paths, "classifying"):
            try:
                with about_paths(path, *asked.files):
                    checkpoint, numbers = steps.get(path) or (files.load(path, length), {})
                    result = cast(
                        "Classified", run_analysis("classify", checkpoint, **asked.drawn_by)
                    )
                    documents.append(to_json("classify", checkpoint, result) | numbers | asked.note)
            except (ValueError, OSError) as error:
                unread = {"understood": False} if isinstance(error, NotUnderstoodError) else {}
                documents.append({"path": str(path), **unread, "error": str(error)})
                complain(str(error))
                continue
            if asked.as_json:
                continue
            if len(all_paths) == 1 or wide:
                say_of(path, classification_text(result, wide=wide))
                continue
            if result.heads_title not in headers:
                headers.add(result.heads_title)
                say(result.heads_title)
            say_of(path, brief_text(result))
    if asked.as_json:
        say_json(documents)
    if out is not None:
        write_table(out, documents)
    if any("error" in document for document in documents):
        raise typer.Exit(2)


def _steps(
    groups: Sequence[Sequence[Path]], files: Files, context_length: int | None
) -> dict[Path, tuple["Checkpoint", dict[str, float]]]:
    """Model at each step of a run, with the step and its loss, for those paths that are steps of a
    run."""
    from mechinterp.checkpoints.load import steps_of

    steps = {}
    for group in groups:
        run = files.run_of(group, context_length)
        if run is None or run.history is None:
            continue
        losses = run.history.drop_duplicates("step").set_index("step")
        for step, path in steps_of(group, told=True).items():
            numbers = {"step": step, "loss": losses["eval_loss"][step]}
            numbers["loss_sem"] = losses["eval_loss_sem"][step]
            steps[path] = replace(run.at(step), path=path), numbers
    return steps


@reads_checkpoints
def info(
    path: PathArgument,
    as_json: JsonOption = False,
    wide: Annotated[bool, option("--wide", "Also list the hook points.")] = False,
    *,
    hints: "Hints",
) -> None:
    """Show the main facts of a checkpoint. Example: mechinterp info checkpoints/softmax-h2-s0"""
    from mechinterp.checkpoints.native.folder import outline_of
    from mechinterp.report.info import info_document, info_text

    hooks = as_json or wide
    outline = None if hooks or hints.given else outline_of(path)
    document = info_document(outline or Files(hints).load(path), hooks=hooks)
    answer(document, info_text(document), as_json=as_json)


@reads_checkpoints
def convert(
    path: PathArgument,
    target: Annotated[str, option("--to", "native, transformer-lens or npz.")],
    out: Annotated[Path, option("--out", "New folder, or new file for npz.")],
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Write a checkpoint in another format. Example: mechinterp convert checkpoints/softmax-h2-s0 --to transformer-lens --out h2"""
    from mechinterp.checkpoints import load as loading
    from mechinterp.report.to_json import conversion_document

    with about_paths(path, out):
        checkpoint = Files(hints).load(path)
        files = loading.convert(checkpoint, target, out)
    document = conversion_document(checkpoint, target, files)
    names = ", ".join(str(file.relative_to(out)) for file in files if file != out) or "written"
    lines = [f"{shown_path(out)}: {names}"]
    if document["n_ctx"] is not None:
        how = "read load.py, then run it with transformer-lens 2 or 3."
        lines.append(f"n_ctx is {document['n_ctx']}; {how}")
    if document["left_out"]:
        lines.append(f"Left out: {', '.join(document['left_out'])}.")
    answer(document, "\n".join(lines), as_json=as_json)


@runs_checkpoints
def report(
    paths: Annotated[
        list[Path], argument("PATH...", "A checkpoint; several, or a folder, are compared.")
    ],
    out: Annotated[Path, option("--out", "Folder for the page and its CSV files.")],
    prompts: PromptsOption = None,
    n_prompts: CountOption = None,
    seed: SeedOption = 0,
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
    """Write a report as one HTML page. Example: mechinterp report checkpoints/softmax-h2-s0 --out reports/h2"""
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.text import wrapped

    with progress_bars(quiet=quiet) as progress:
        asked: dict[str, Any] = {
            **({} if prompts is None else {"prompts": prompts_of(prompts)}),
            **({} if n_prompts is None else {"n_prompts": n_prompts}),
            "seed": seed,
            "overwrite": overwrite,
            "figures": figures,
            "progress": progress,
        }
        about, written = _written(paths, out, analyses, files, asked)
    document = about[0] if len(about) == 1 else {"checkpoints": about}
    shown = f"{wrapped(written.verdict, '  ')}\nReport: {shown_path(written.page.resolve())}"
    answer(document | written.to_document(), shown, as_json=as_json)
    if any("error" in each for each in about):
        raise typer.Exit(2)


def _written(
    paths: list[Path],
    out: Path,
    analyses: list[str] | None,
    files: Files,
    asked: dict[str, Any],
) -> tuple[list[dict[str, str]], "Report"]:
    """JSON entries of all paths, and the report on one or several checkpoints."""
    from mechinterp.checkpoints.load import checkpoint_paths, runs_among
    from mechinterp.report.page import write_comparison, write_report

    all_paths = checkpoint_paths(paths)
    groups = runs_among(all_paths)
    run = files.run_of(groups[0]) if len(groups) == 1 else None
    if run is not None or len(all_paths) == 1:
        path = all_paths[0] if run is None else run.path
        with about_paths(path, out):
            checkpoint = run or files.load(path)
            return [{"path": str(path)}], write_report(checkpoint, out, analyses=analyses, **asked)
    for flag, value in (("--analysis", analyses), ("--prompts", asked.get("prompts"))):
        if value is not None:
            raise ValueError(f"{flag} needs one checkpoint, got {len(all_paths)}.")
    loaded, about = _those_that_load(groups, files)
    left_out = {each["path"]: each["error"] for each in about if "error" in each}
    with about_paths(out):
        return about, write_comparison(loaded, out, left_out=left_out, **asked)


def _those_that_load(
    groups: list[list[Path]], files: Files
) -> tuple[list["Checkpoint"], list[dict[str, str]]]:
    """Readable checkpoints, where a run counts as one, and a JSON entry of every path with its
    error, if any."""
    from mechinterp.models.weights import why_no_circuits

    loaded, about = [], []
    for group in groups:
        run = files.run_of(group)
        for path in group if run is None else [run.path]:
            try:
                with about_paths(path):
                    checkpoint = run or files.load(path)
                    if why := why_no_circuits(checkpoint.config.model):
                        raise ValueError(
                            f"{checkpoint.path}: a comparison needs models of one layer of attention without other parts, "
                            f"got {why}; make a report on this model alone."
                        )
                loaded.append(checkpoint)
                about.append({"path": str(path)})
            except (ValueError, OSError) as error:
                about.append({"path": str(path), "error": str(error)})
                complain(str(error))
    return loaded, about
