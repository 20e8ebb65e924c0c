"""Commands that describe a checkpoint: argument parsing only."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mechinterp.cli.options import (
    Asked,
    Files,
    PathArgument,
    about_paths,
    asks_checkpoints,
    complain,
    reads_checkpoints,
    say_of,
    shown_path,
)
from mechinterp.cli.training import JsonOption, answer, say, say_json

if TYPE_CHECKING:
    from mechinterp.analysis.classified import Classified
    from mechinterp.checkpoints.checkpoint import Checkpoint
    from mechinterp.checkpoints.foreign.options import Hints


@asks_checkpoints
def classify(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Checkpoints, or folders of them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="New table, .parquet or .csv, with one row per checkpoint."),
    ] = None,
    *,
    asked: Asked,
    files: Files,
) -> None:
    """State what a model computes, and how certain that is. Example: mechinterp classify
    checkpoints/*"""
    from mechinterp.checkpoints.io.errors import NotUnderstoodError
    from mechinterp.checkpoints.paths import checkpoint_paths, runs_among
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.to_csv import require_writable, write_table
    from mechinterp.report.to_json import to_json

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
                    result = _classified(checkpoint, asked)
                    documents.append(to_json("classify", checkpoint, result) | numbers | asked.note)
            except (ValueError, OSError) as error:
                unread = {"understood": False} if isinstance(error, NotUnderstoodError) else {}
                documents.append({"path": str(path), **unread, "error": str(error)})
                complain(str(error))
                continue
            if not asked.as_json:
                one_of_many = None if len(all_paths) == 1 or wide else headers
                _show_classification(path, result, headers=one_of_many, wide=wide)
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
    from mechinterp.checkpoints.paths import steps_of

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


def _classified(checkpoint: "Checkpoint", asked: Asked) -> "Classified":

    from mechinterp.analysis.registry import run_analysis

    return run_analysis(  # type: ignore[return-value]
        "classify",
        checkpoint,
        prompts=asked.given,
        context_length=asked.context_length,
        n_prompts=asked.n_prompts,
        seed=asked.seed,
    )


def _show_classification(
    path: Path, result: "Classified", *, headers: set[str] | None, wide: bool
) -> None:
    """Print a classification: in full, or for one of many in a few lines below headings that are
    printed once."""
    from mechinterp.report.to_text import brief_text, classification_text

    if headers is None:
        say_of(path, classification_text(result, wide=wide))
        return
    if result.heads_title not in headers:
        headers.add(result.heads_title)
        say(result.heads_title)
    say_of(path, brief_text(result))


@reads_checkpoints
def info(
    path: PathArgument,
    as_json: JsonOption = False,
    wide: Annotated[bool, typer.Option("--wide", help="Also list the hook points.")] = False,
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
    target: Annotated[str, typer.Option("--to", help="native, transformer-lens or npz.")],
    out: Annotated[Path, typer.Option("--out", help="New folder, or new file for npz.")],
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
