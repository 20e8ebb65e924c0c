"""The command that writes a report as a page: argument parsing only."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechinterp.cli.options import (
    CountOption,
    SeedOption,
    about_paths,
    complain,
    load_checkpoint,
    require_one_layer,
    run_of,
    runs_checkpoints,
    shown_path,
)
from mechinterp.cli.training import JsonOption, QuietOption, say

if TYPE_CHECKING:
    from mechinterp.checkpoints.checkpoint import Checkpoint
    from mechinterp.checkpoints.foreign.options import Hints


@runs_checkpoints
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="A checkpoint; several, or a folder, are compared."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its CSV files.")],
    n_prompts: CountOption = None,
    seed: SeedOption = 0,
    analyses: Annotated[
        list[str] | None,
        typer.Option(
            "--analysis",
            metavar="NAME",
            help="An analysis to show, or my_module:my_function, of one checkpoint; may be repeated; those that suit it if left out.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a report that is there.")
    ] = False,
    figures: Annotated[
        str,
        typer.Option("--figures", help="pdf, svg or png: each figure also as a file for print."),
    ] = "",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
    *,
    hints: "Hints",
    device: str,
) -> None:
    """Write a report as one HTML page. Example: mechinterp report checkpoints/softmax-h2-s0 --out reports/h2"""
    from mechinterp.checkpoints.paths import checkpoint_paths, runs_among
    from mechinterp.report.bars import progress_bars
    from mechinterp.report.comparison import write_comparison
    from mechinterp.report.header import dumps
    from mechinterp.report.page import write_report
    from mechinterp.report.text import wrapped

    found = checkpoint_paths(paths)
    groups = runs_among(found)
    run = run_of(groups[0], hints, device=device) if len(groups) == 1 else None
    if run is None and len(found) > 1 and analyses is not None:
        raise ValueError(f"--analysis is of one checkpoint, got {len(found)} of them.")
    with progress_bars(quiet=quiet) as progress:
        asked: dict[str, Any] = {
            **({} if n_prompts is None else {"n_prompts": n_prompts}),
            "seed": seed,
            "overwrite": overwrite,
            "figures": figures,
            "progress": progress,
        }
        if run is not None or len(found) == 1:
            about: list[dict] = [{"path": str(found[0] if run is None else run.path)}]
            with about_paths(Path(about[0]["path"]), out):
                checkpoint = run or load_checkpoint(found[0], hints, device=device)
                written = write_report(checkpoint, out, analyses=analyses, **asked)
            document = about[0] | written.to_document()
        else:
            loaded, about = _those_that_load(groups, hints, device)
            left_out = {each["path"]: each["error"] for each in about if "error" in each}
            with about_paths(out):
                written = write_comparison(loaded, out, left_out=left_out, **asked)
            document = {"checkpoints": about, **written.to_document()}
    shown = f"{wrapped(written.verdict, '  ')}\nReport: {shown_path(written.page.resolve())}"
    say(dumps(document) if as_json else shown)
    if any("error" in each for each in about):
        raise typer.Exit(2)


def _those_that_load(
    groups: list[list[Path]], hints: "Hints", device: str
) -> tuple[list["Checkpoint"], list[dict[str, str]]]:
    """The checkpoints that can be read, a run being one, and of every path what JSON says: its error if there is one."""
    loaded, about = [], []
    for group in groups:
        run = run_of(group, hints, device=device)
        for path in group if run is None else [run.path]:
            try:
                with about_paths(path):
                    checkpoint = run or load_checkpoint(path, hints, device=device)
                    require_one_layer(checkpoint)
                loaded.append(checkpoint)
                about.append({"path": str(path)})
            except (ValueError, OSError) as error:
                about.append({"path": str(path), "error": str(error)})
                complain(str(error))
    return loaded, about
