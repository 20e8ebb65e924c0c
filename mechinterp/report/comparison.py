"""Page that compares several checkpoints: settings with their seeds, models, and overlaid training curves."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from mechinterp.analysis.columns import meanings
from mechinterp.analysis.comparison import Comparison, compare
from mechinterp.analysis.result import Table
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.io.errors import printable
from mechinterp.display import counted
from mechinterp.progress import ProgressCallback, no_progress
from mechinterp.report import to_html
from mechinterp.report.page import PAGE, Report, require_free, write_page
from mechinterp.report.parts import Section

LONGEST_TABLE = 1000


def write_comparison(
    checkpoints: Sequence[Checkpoint],
    out: str | Path,
    *,
    left_out: Mapping[str, str] | None = None,
    n_prompts: int = 4096,
    seed: int = 0,
    overwrite: bool = False,
    figures: str = "",
    progress: ProgressCallback = no_progress,
) -> Report:
    """Write `out/index.html`, which compares the checkpoints, and its CSV files.

    Args:
        left_out: Paths that could not be compared, with the reason, to be listed on the page.
        n_prompts: Prompts per classification; losses use five times as many.
        figures: As in `write_report`.
        progress: Optional progress callback.
    Raises:
        ValueError: If there is no checkpoint, or `out` is a file or a nonempty folder without
            `overwrite`.
    Example:
        >>> import tempfile
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> models = [load(f"checkpoints/softmax-h1-s{seed}") for seed in (0, 1)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_comparison(models, folder, n_prompts=64).verdict
        '2 models of 1 setting: softmax-h1: kernel_regression 2.'
    """
    require_free(Path(out), overwrite)
    checkpoints = sorted(checkpoints, key=lambda each: natural(each.name))
    comparison = compare(checkpoints, n_prompts=n_prompts, seed=seed, progress=progress)
    parts = [
        _settings(comparison, n_prompts, _pages(comparison, Path(out))),
        *([_left_out(left_out)] if left_out else []),
        _heads(comparison),
        *_training(comparison),
    ]
    title = "Comparison of " + counted(len(checkpoints), "model")
    about = ", ".join(comparison.names)
    verdict = _verdict(comparison)
    if left_out:
        verdict += f" Left out: {len(left_out)} of {len(left_out) + len(checkpoints)}."
    return write_page(Path(out), title, about, verdict, parts, overwrite=overwrite, figures=figures)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of names, which puts s2 before s10.

    Example:
        >>> sorted(["s10", "s2", "s1"], key=natural)
        ['s1', 's2', 's10']
    """
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _pages(comparison: Comparison, out: Path) -> dict[str, str]:
    """Addresses of the models' own reports, if they lie beside this one in folders with the models' names."""
    beside = out.resolve().parent
    return {
        name: f"../{quote(name)}/{PAGE}"
        for name in comparison.names
        if to_html.files_of(beside / name / PAGE)
    }


def _verdict(comparison: Comparison) -> str:
    counts = [
        f"{setting}: " + ", ".join(f"{row.pattern} {row.models}" for row in rows.itertuples())
        for setting, rows in comparison.settings_frame().groupby("setting", sort=False)
    ]
    settings = counted(len(comparison.fields), "setting")
    return f"{counted(len(comparison.names), 'model')} of {settings}: {'; '.join(counts)}."


def _settings(comparison: Comparison, n_prompts: int, pages: Mapping[str, str]) -> Section:
    tables = {"settings": comparison.settings_frame(), "models": comparison.to_frame()}
    if len(comparison.fields.columns) > 1:
        tables["fields"] = comparison.fields
    columns = [column for frame in tables.values() for column in frame.columns]
    return Section(
        "Settings and models",
        "Models that differ in nothing but seeds share a setting; a row holds those of its models that form one pattern. "
        "Means are over models, and so are their standard errors. Click a column's name to sort by it. "
        "A model's name leads to its own report where that lies beside this one, in a folder of that name.",
        f"Losses are mean squared errors on {5 * n_prompts} prompts of the model's own task and context length, the same "
        "prompts for all models of one task. omega and mu are as in the report on one model.",
        figures={"means": comparison.plot_means()}
        if len(comparison.names) > len(comparison.fields)
        else {},
        tables={name: Table(frame) for name, frame in tables.items()},
        meanings=meanings(comparison, columns),
        longest_table=LONGEST_TABLE,
        unfolded=True,
        links=pages,
    )


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
        longest_table=LONGEST_TABLE,
        unfolded=True,
    )


def _heads(comparison: Comparison) -> Section:
    return Section(
        "Heads of all models",
        "Every head by omega and mu; in the published pattern heads lie on two points, mirror images of each other.",
        "From the weights alone; a point is a head, a colour a setting.",
        {"heads": comparison.plot()},
    )


def _training(comparison: Comparison) -> list[Section]:
    if not any(len(curve) for curve in comparison.curves):
        return []
    return [
        Section(
            "Training",
            "Loss on prompts that training never sees. Models without a history are left out.",
            "From each model's history, at most 200 steps of it; settings may have different evaluation prompts. Means are of "
            "settings whose models share their steps, error bars standard errors over the models.",
            {"curves": comparison.plot_curves()}
            | ({"mean_curves": comparison.plot_mean_curves()} if comparison.mean_curves() else {}),
        )
    ]
