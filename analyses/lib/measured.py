"""Shared code of the scripts: shipped checkpoints, failed trainings, and the files of results."""

import argparse
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pandas as pd
import plotly.graph_objects as go
import torch
from plotly.offline import get_plotlyjs

import mechinterp
from analyses.lib.records import Record, save
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.config import ExperimentConfig
from mechinterp.config.experiment import from_dict

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "analyses" / "results"
SETTING = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
ROSE = 1.5
"""A training failed if its last evaluation loss exceeds this multiple of the smallest one."""


@dataclass(frozen=True)
class Measured:
    """Results of a script: data, figures and records."""

    data: pd.DataFrame
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    claims: Iterable[Record] = ()


@cache
def checkpoint(name: str) -> Checkpoint:
    """A shipped checkpoint."""
    return load(ROOT / "checkpoints" / name)


def shipped(pattern: str) -> list[str]:
    """Names of the shipped checkpoints that match the pattern, sorted by number of heads and by
    seed."""
    found = (file.parent.name for file in (ROOT / "checkpoints").glob(f"{pattern}/config.json"))
    return sorted(found, key=lambda name: (checkpoint(name).config.model.n_heads, len(name), name))


def losses(name: str) -> pd.Series:
    """Evaluation loss of a shipped model by step; empty without a history."""
    history = checkpoint(name).history
    if history is None:
        return pd.Series(dtype=float)
    return history.groupby("step").eval_loss.first().dropna()


def failed(name: str) -> bool:
    """True if the training of a shipped model failed: its loss had been much lower before."""
    loss = losses(name)
    return len(loss) > 0 and bool(loss.iloc[-1] > ROSE * loss.min())


def trained(pattern: str) -> list[str]:
    """Shipped checkpoints that match the pattern, without failed trainings; claims use these."""
    return [name for name in shipped(pattern) if not failed(name)]


def failures(pattern: str) -> pd.DataFrame:
    """Failed trainings among the shipped checkpoints that match the pattern: first, smallest and
    last loss."""
    paths = {name: losses(name) for name in shipped(pattern) if failed(name)}
    rows = [
        {"model": name, "first": loss.iloc[0], "least": loss.min(), "at": loss.idxmin()}
        | {"last": loss.iloc[-1], "ratio": loss.iloc[-1] / loss.min()}
        for name, loss in paths.items()
    ]
    return pd.DataFrame(rows)


def scripts() -> list[str]:
    """Names of the scripts with a `measure` function, such as softmax/patterns."""
    files = sorted((ROOT / "analyses").glob("*/*.py"))
    found = [file for file in files if "\ndef measure(" in file.read_text(encoding="utf-8")]
    return [f"{file.parent.name}/{file.stem}" for file in found]


def module_of(script: str) -> ModuleType:
    """Module of a script."""
    return import_module(f"analyses.{script.replace('/', '.')}")


def parser_of(doc: str, *, quick: str = "", out: Path = RESULTS) -> argparse.ArgumentParser:
    """Options of a script that is run by hand: --out and, if it has a help text, --quick."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, default=out)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parsed options; creates the output folder and limits torch to one thread."""
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    return given


def write(
    measured: Measured,
    name: str,
    out: Path,
    *,
    png: bool = False,
    seconds: float | None = None,
    note: str = "",
) -> None:
    """Write the files of one script; `note` marks results of an earlier run."""
    out.mkdir(parents=True, exist_ok=True)
    measured.data.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    records = list(measured.claims)
    save(out, name, records, provenance(measured.data, records, seconds) | {"note": note})
    for record in records:
        print(f"{record.id}: {record.statement}: {record.measured}: {record.verdict}")
    if measured.figures:
        page = [f"<!doctype html><meta charset='utf-8'><title>{name}</title>"]
        page += ['<script src="plotly.min.js"></script>']
        for figure in measured.figures.values():
            page.append(figure.to_html(full_html=False, include_plotlyjs=False))
        (out / f"{name}.html").write_text("\n".join(page), encoding="utf-8")
        (out / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    for title, figure in measured.figures.items() if png else ():
        figure.write_image(out / f"{name}-{title}.png", width=800)


def provenance(data: pd.DataFrame, records: Iterable[Record], seconds: float | None) -> dict:
    """Origin of results: version, commit, ids and seeds of the checkpoints that they name, and
    processor time."""
    commit = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return {
        "version": mechinterp.__version__,
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "seconds": seconds and round(seconds, 1),
        "checkpoints": checkpoint_ids(data, records),
    }


def checkpoint_ids(data: pd.DataFrame, records: Iterable[Record]) -> dict[str, dict]:
    """Id and seed of every shipped checkpoint that is named in the data or in the records' values."""
    texts = data.select_dtypes(exclude="number")
    words = {str(value) for _, column in texts.items() for value in column}
    words |= set(map(str, data.columns)) | {name for record in records for name in record.values}
    patterns = {word for record in records for word in re.split(r",? ", record.models)}
    folders = {file.parent.name: file for file in (ROOT / "checkpoints").glob("*/config.json")}
    named = [n for n in sorted(folders) if n in words or any(fnmatch(n, p) for p in patterns)]
    configs = {name: shipped_config(folders[name]) for name in named}
    return {name: {"id": config.id, "seed": config.seed} for name, config in configs.items()}


def shipped_config(file: Path) -> ExperimentConfig:
    """Config of a checkpoint, without reading its weights."""
    return from_dict(json.loads(file.read_text(encoding="utf-8"))["experiment"])
