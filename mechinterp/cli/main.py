"""The command line: argument parsing and exit codes; everything else is called.

Each command imports what it needs, so that `mechinterp --help` and `classify` start fast.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mechinterp.cli.heads import ablate, analyse, probe, prune, show
from mechinterp.cli.options import (
    TOO_LARGE,
    Asked,
    LengthOption,
    PathArgument,
    PromptsOption,
    SeedOption,
    about_paths,
    complain,
    is_out_of_memory,
    load_checkpoint,
    one_layer,
    reads_checkpoints,
    runs_checkpoints,
    say_of,
    shown_path,
)
from mechinterp.cli.training import (
    JsonOption,
    QuietOption,
    WideOption,
    predict_jumps,
    say,
    sweep,
    train,
)

if TYPE_CHECKING:
    from mechinterp.checkpoints.hints import Hints
    from mechinterp.checkpoints.native import Checkpoint

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its help takes twice the start-up, in a third of the width
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> bool:
    """Print the version, if it is asked for, and end."""
    if asked:
        from mechinterp.version import __version__

        say(f"mechinterp {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=show_version, help="Show the version."),
    ] = False,
) -> None:
    """What attention models compute when they do in-context linear regression."""


KEPT = "it is not overwritten."  # how the package refuses a file or folder that is there
INTERRUPTED = 130  # what the argument parser makes of Ctrl-C


def main() -> None:
    """Entry point of the console script: exit code 0, or 2 with one line on standard error."""
    # Imports make millions of objects that stay: to look through them for cycles, at the end too, takes half a second.
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    arguments = sys.argv[1:] or ["--help"]
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the command: nobody listens
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        code = app(arguments, standalone_mode=False, prog_name="mechinterp")
        if code == INTERRUPTED:
            trains = arguments[0] in ("train", "sweep")
            complain("interrupted" + ("; it goes on with --resume." if trains else "."))
    except (ValueError, OSError) as error:
        from mechinterp.checkpoints.errors import one_line

        _fail(_with_next_step(one_line(error)), 2)
    except Exception as error:
        if is_out_of_memory(error):
            _fail(f"{arguments[0]} {TOO_LARGE}", 2)
        # Errors of the argument parser; the class is not public in every version of typer.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        hint = "" if context is None else f" See {context.command_path} --help."
        _fail(_with_value(error.format_message(), error, arguments) + hint, 2)
    sys.exit(code if isinstance(code, int) else 0)


def command(run: Callable[..., None]) -> Callable[..., None]:
    """Adds a command; what its docstring says after "Example:" stands below its options, and not in the list of all."""
    text, _, example = (run.__doc__ or "").partition(" Example: ")
    name = run.__name__.replace("_", "-")
    return app.command(name=name, help=text, epilog=f"Example: {example}")(run)


for each in (train, sweep, predict_jumps):
    command(each)


@command
@runs_checkpoints
def classify(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Checkpoints, or folders of them.")
    ],
    n_prompts: Annotated[
        int | None,
        typer.Option(
            "--n-prompts",
            min=2,
            help="Number of evaluation prompts; 512 if left out, 256 for models of several layers.",
        ),
    ] = None,
    seed: SeedOption = 0,
    context_length: LengthOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A new table, .parquet or .csv: a row for each checkpoint."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
    wide: WideOption = False,
    *,
    hints: "Hints",
    device: str,
) -> None:
    """Say what a model computes, and how sure that is. Example: mechinterp classify checkpoints/*"""
    from mechinterp.analysis.circuits.patterns import classify as classified
    from mechinterp.checkpoints.loading import checkpoint_paths
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.classification import (
        brief_text,
        classification_document,
        classification_text,
        heads_header,
    )
    from mechinterp.report.header import dumps
    from mechinterp.report.table import require_writable, write_table

    if out is not None:
        require_writable(out)
    documents: list[dict] = []
    found_paths = checkpoint_paths(paths)
    headers: set[str] = set()
    with progress_bars(quiet=quiet) as progress:
        for path in progress(found_paths, "classifying"):
            try:
                with about_paths(path):
                    checkpoint = load_checkpoint(path, hints, context_length, device=device)
                    task = checkpoint.task
                    if context_length is not None:
                        task = replace(task, context_length=context_length)
                    found = classified(checkpoint, task, n_prompts=n_prompts, seed=seed)
                    documents.append(classification_document(checkpoint, found))
            except (ValueError, OSError) as error:
                documents.append({"path": str(path), "error": str(error)})
                complain(str(error))
                continue
            if as_json:
                continue
            if len(found_paths) == 1 or wide:
                say_of(path, classification_text(found, wide=wide))
                continue
            if heads_header(found) not in headers:
                headers.add(heads_header(found))
                say(heads_header(found))
            say_of(path, brief_text(found))
    if as_json:
        say(dumps(documents))
    if out is not None:
        write_table(out, documents)
    if any("error" in document for document in documents):
        raise typer.Exit(2)


for each in (ablate, prune, probe, analyse):
    command(each)


@command
@runs_checkpoints
def fit(
    path: PathArgument,
    n_prompts: PromptsOption = 20_000,
    seed: SeedOption = 0,
    context_length: Annotated[
        list[int] | None,
        typer.Option(
            "--context-length",
            min=1,
            help="Pairs per prompt; may be repeated; 10, 20, ..., 100 if left out.",
        ),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
    wide: WideOption = False,
    *,
    hints: "Hints",
    device: str,
) -> None:
    """Fit closed-form learners to the model. Example: mechinterp fit checkpoints/softmax-h2-s0"""
    from mechinterp.analysis.learners.fits import CONTEXT_LENGTHS

    asked = Asked(n_prompts=n_prompts, seed=seed, quiet=quiet, as_json=as_json, wide=wide)
    settings = {"context_lengths": context_length or CONTEXT_LENGTHS}
    show("fit", path, asked, hints, device, settings)


@command
@runs_checkpoints
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="A checkpoint; several, or a folder, are compared."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its CSV files.")],
    n_prompts: PromptsOption = 4096,
    seed: SeedOption = 0,
    analyses: Annotated[
        list[str] | None,
        typer.Option(
            "--analysis",
            metavar="NAME",
            help="An analysis to show, of one checkpoint; may be repeated; those that suit it if left out.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a report that is there.")
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
    device: str,
) -> None:
    """Write a report as one HTML page. Example: mechinterp report checkpoints/softmax-h2-s0 --out reports/h2"""
    from mechinterp.checkpoints.loading import checkpoint_paths
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.comparison import write_comparison
    from mechinterp.report.header import dumps
    from mechinterp.report.page import write_report
    from mechinterp.report.text import wrapped

    found = checkpoint_paths(paths)
    if len(found) == 1:
        about: list[dict] = [{"path": str(found[0])}]
        with about_paths(found[0], out), progress_bars(quiet=quiet) as progress:
            written = write_report(
                load_checkpoint(found[0], hints, device=device),
                out,
                n_prompts=n_prompts,
                seed=seed,
                analyses=analyses,
                overwrite=overwrite,
                progress=progress,
            )
        document = about[0] | written.to_document()
    else:
        if analyses is not None:
            raise ValueError(f"--analysis is of one checkpoint, got {len(found)} of them.")
        loaded, about = _those_that_load(found, hints, device)
        with about_paths(out), progress_bars(quiet=quiet) as progress:
            written = write_comparison(
                loaded,
                out,
                left_out={each["path"]: each["error"] for each in about if "error" in each},
                n_prompts=n_prompts,
                seed=seed,
                overwrite=overwrite,
                progress=progress,
            )
        document = {"checkpoints": about, **written.to_document()}
    shown = f"{wrapped(written.verdict, '  ')}\nReport: {shown_path(written.page.resolve())}"
    say(dumps(document) if as_json else shown)
    if any("error" in each for each in about):
        raise typer.Exit(2)


@command
@reads_checkpoints
def info(
    path: PathArgument,
    as_json: JsonOption = False,
    wide: Annotated[bool, typer.Option("--wide", help="List the hook points, too.")] = False,
    *,
    hints: "Hints",
) -> None:
    """Show a checkpoint at a glance. Example: mechinterp info checkpoints/softmax-h2-s0"""
    from mechinterp.checkpoints.outline import outline_of
    from mechinterp.report.header import dumps
    from mechinterp.report.info import info_document, info_text

    hooks = as_json or wide
    outline = None if hooks or hints.given else outline_of(path)
    document = info_document(outline or load_checkpoint(path, hints), hooks=hooks)
    say(dumps(document) if as_json else info_text(document))


@command
@reads_checkpoints
def convert(
    path: PathArgument,
    target: Annotated[str, typer.Option("--to", help="native, transformer-lens or npz.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder; a new file for npz.")],
    as_json: JsonOption = False,
    *,
    hints: "Hints",
) -> None:
    """Write a checkpoint in another format. Example: mechinterp convert checkpoints/softmax-h2-s0 --to transformer-lens --out h2"""
    from mechinterp.checkpoints import loading
    from mechinterp.report.documents import conversion_document
    from mechinterp.report.header import dumps

    with about_paths(path, out):
        checkpoint = load_checkpoint(path, hints)
        files = loading.convert(checkpoint, target, out)
    document = conversion_document(checkpoint, target, files)
    if as_json:
        say(dumps(document))
        return
    say(
        f"{shown_path(out)}: {', '.join(str(f.relative_to(out)) for f in files if f != out) or 'written'}"
    )
    if document["n_ctx"] is not None:
        say(
            f"n_ctx is {document['n_ctx']}; read load.py, then run it with transformer-lens 2 or 3."
        )
    if document["left_out"]:
        say(f"Left out: {', '.join(document['left_out'])}.")


def _those_that_load(
    paths: list[Path], hints: "Hints", device: str
) -> tuple[list["Checkpoint"], list[dict[str, str]]]:
    """The checkpoints that can be read, and of every path what JSON says: its error if there is one."""
    loaded, about = [], []
    for path in paths:
        try:
            with about_paths(path):
                loaded.append(one_layer(path, hints, device))
            about.append({"path": str(path)})
        except (ValueError, OSError) as error:
            about.append({"path": str(path), "error": str(error)})
            complain(str(error))
    return loaded, about


def _with_value(message: str, error: Exception, arguments: list[str]) -> str:
    """The argument parser's message, with what was given for the option it speaks of."""
    names = getattr(getattr(error, "param", None), "opts", [])
    given = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            given.append(value if equals else following)
    return f"{message.rstrip('.')}, got {', '.join(given)}." if given else message


def _with_next_step(message: str) -> str:
    """The message, with what to type next where what is there is left as it is."""
    if not message.endswith(KEPT):
        return message
    return f"{message.removesuffix('.')}; choose another --out."


def _fail(message: str, code: int) -> None:
    complain(message)
    sys.exit(code)
