"""The command that writes a report as a page: argument parsing only."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechinterp.cli.options import (
    CountOption,
    Files,
    PromptsOption,
    SeedOption,
    about_paths,
    complain,
    prompts_of,
    runs_checkpoints,
    shown_path,
)
from mechinterp.cli.training import JsonOption, QuietOption, answer

if TYPE_CHECKING:
    from mechinterp.checkpoints.checkpoint import Checkpoint
    from mechinterp.report.page import Report


@runs_checkpoints
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="A checkpoint; several, or a folder, are compared."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its CSV files.")],
    prompts: PromptsOption = None,
    n_prompts: CountOption = None,
    seed: SeedOption = 0,
    analyses: Annotated[
        list[str] | None,
        typer.Option(
            "--analysis",
            metavar="NAME",
            help="An analysis to show, or my_module:my_function; repeatable; for one checkpoint only; default: all that suit the model.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing report.")
    ] = False,
    figures: Annotated[
        str,
        typer.Option("--figures", help="Also write each figure as a file: pdf, svg or png."),
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
    from mechinterp.checkpoints.paths import checkpoint_paths, runs_among
    from mechinterp.report.comparison import write_comparison
    from mechinterp.report.page import write_report

    all_paths = checkpoint_paths(paths)
    groups = runs_among(all_paths)
    run = files.run_of(groups[0]) if len(groups) == 1 else None
    if run is not None or len(all_paths) == 1:
        path = all_paths[0] if run is None else run.path
        with about_paths(path, out):
            checkpoint = run or files.load(path)
            return [{"path": str(path)}], write_report(checkpoint, out, analyses=analyses, **asked)
    for option, value in (("--analysis", analyses), ("--prompts", asked.get("prompts"))):
        if value is not None:
            raise ValueError(f"{option} needs one checkpoint, got {len(all_paths)}.")
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
