"""What the scripts of figures and tables share: a claim with its numbers, and writing what was measured.

A script defines `measure(quick)` and ends with `run(measure, __file__)`. With S the script's name it writes S.csv (the
figure's data), S.claims.csv (the paper's numbers beside ours) and S.html (figures, needing the plotly.min.js written
beside it) into results/. `--quick` makes it a minute's run or less; `--png` draws PNGs too and needs a browser.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import torch
from plotly.offline import get_plotlyjs

from mechinterp.checkpoints.native import Checkpoint, load

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "analyses" / "results"
SETTING = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
VERDICTS = {True: "holds", False: "does not hold"}


@dataclass(frozen=True)
class Claim:
    """One claim of a paper, its number and ours."""

    id: str
    """The claim's id, "O1a" to "T7"; "" for a number of the paper that no claim needs."""
    claim: str
    models: str
    """Checkpoints or "closed form"."""
    paper: str
    ours: str
    """The number with its standard error, or a range over models."""
    holds: bool | str
    """True, False, or a verdict in words where the paper's claim is too vague for one."""


@dataclass(frozen=True)
class Measured:
    """What a script found."""

    data: pd.DataFrame
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    claims: Iterable[Claim] = ()


@cache
def checkpoint(name: str) -> Checkpoint:
    """A shipped checkpoint."""
    return load(ROOT / "checkpoints" / name)


def shipped(pattern: str) -> list[str]:
    """Names of shipped checkpoints that match, those of fewer heads and smaller seeds first."""
    found = (file.parent.name for file in (ROOT / "checkpoints").glob(f"{pattern}/config.json"))
    return sorted(found, key=lambda name: (checkpoint(name).config.model.n_heads, len(name), name))


def numbers(values: Iterable[float], digits: int = 3) -> str:
    """A range of numbers as text.

    Example:
        >>> numbers([0.1302, 0.1291])
        '0.129 to 0.130'
    """
    ordered = sorted(values)
    low, high = (f"{value:.{digits}f}" for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


def near(values: Iterable[float], target: float, *, within: float) -> bool:
    """Whether all values are within a relative distance of a target.

    Example:
        >>> near([0.126, 0.131], 0.128, within=0.03)
        True
    """
    return all(abs(value / target - 1) <= within for value in values)


def run(measure: Callable[[bool], Measured], script: str) -> None:
    """Measure, write and print the claims."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer prompts or steps")
    parser.add_argument("--png", action="store_true", help="draw PNGs too; needs a browser")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write into")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write(measure(arguments.quick), Path(script).stem, arguments.out, png=arguments.png)


def write(measured: Measured, name: str, out: Path, *, png: bool = False) -> None:
    """The files of one script."""
    out.mkdir(parents=True, exist_ok=True)
    measured.data.to_csv(out / f"{name}.csv", index=False, float_format="%.6g")
    claims = pd.DataFrame([asdict(claim) for claim in measured.claims])
    if len(claims):
        claims["holds"] = [VERDICTS.get(verdict, verdict) for verdict in claims["holds"]]
        claims.to_csv(out / f"{name}.claims.csv", index=False)
        print(claims.to_string(index=False))
    if measured.figures:
        page = [f"<!doctype html><meta charset='utf-8'><title>{name}</title>"]
        page += ['<script src="plotly.min.js"></script>']
        for figure in measured.figures.values():
            page.append(figure.to_html(full_html=False, include_plotlyjs=False))
        (out / f"{name}.html").write_text("\n".join(page), encoding="utf-8")
        (out / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    for title, figure in measured.figures.items() if png else ():
        figure.write_image(out / f"{name}-{title}.png", width=800)
