"""Tables and figure of the sparse settings, from `results/sparse_settings.csv`.

python -m analyses.sparse.settings_table  (seconds; draws the figure and needs a browser;
lib/pages.py writes the tables)"""

from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analyses.lib.records import span
from analyses.lib.result_tables import markdown

RESULTS = Path(__file__).parents[1] / "results"
CLAIMS = {
    "C9": ("several heads lower the risk by a tenth", "risk / a single head's", "to_single_2d"),
    "C10": ("layer 1 spreads over heads, later layers do not", "heads at work in layer 1", "n_eff_1_median"),
    "C11": ("one head in each later layer is enough", "risk / whole model's, refitted", "later_refit"),
    "C11_pairs": ("a pair in each later layer is enough", "the same", "pairs_refit"),
    "C12": ("one head in layer 1 is not enough", "risk / whole model's, refitted", "first_refit"),
    "C13": ("pruned as in C11, it beats a single head", "risk, refitted / a single head's", "later_refit_to_single"),
    "C14": ("probes improve from layer to layer", "", ""),
    "C15": ("descent is better on the output of layer 1", "risk / that on x, step 16", "step_16_to_raw"),
}  # fmt: skip
"""Text of each claim, its main number, and the column of that number."""
PATTERN = ("C10", "C11", "C12")
SHOWN = (
    "d8s2-linear-h8x4-l3-noise0.1-s0",
    "d8s2-linear-h8x9-l3-noise0.1-s0",
    "d8s2-softmax-h8x9-l3-noise0.1-s0",
    "d8s2-softmax-block-h8x9-l3-noise0.1-lr0.001-s0",
)
"""Models of the figure."""


def with_sem(value: float, sem: float, digits: int = 3) -> str:
    """A number with its standard error, or "no partner".

    Example:
        >>> with_sem(0.5, 0.01)
        '0.500 ± 0.010'
    """
    return "no partner" if pd.isna(value) else f"{value:.{digits}f} ± {sem:.{digits}f}"


def table_of(results: Path) -> pd.DataFrame:
    """One row per model, sorted by setting."""
    found = pd.read_csv(results / "sparse_settings.csv")
    found["setting"] = [setting(row) for _, row in found.iterrows()]
    for claim in CLAIMS:
        found[claim] = found[claim].map({True: True, False: False, "True": True, "False": False})
    # With two heads, the best pair is the whole layer.
    found["C11_pairs"] = found.C11_pairs.where(found.n_heads > 2, np.nan)
    order = ["d_x", "score", "n_layers", "sparsity", "d_head", "n_heads"]
    return found.sort_values(order, ascending=[False, True, True, True, True, True])


def screened(found: pd.DataFrame) -> pd.DataFrame:
    """The first seed of every setting, at the shortest training."""
    return found[(found.seed == found.seed.min()) & (found.steps == found.steps.min())]


def setting(row: pd.Series) -> str:
    """A setting as text: its differences from the central setting, and its heads."""
    parts = [f"d_x {row.d_x}, s {row.sparsity}", row.score]
    if row.n_layers != 3:
        parts.append(f"{row.n_layers} layers")
    if row.noise_var != 0.1:
        parts.append(f"noise {row.noise_var:g}")
    if row.nonzeros != "signs":
        parts.append("Gaussian entries")
    if row.mlp:
        parts.append(f"norm and MLP, rate {row.learning_rate:g}")
    heads = f"{row.n_heads} head{'s' * (row.n_heads > 1)} of width {row.d_head}"
    return "; ".join([*parts, heads])


def several(found: pd.DataFrame) -> pd.DataFrame:
    """The models of several heads."""
    return found[found.n_heads > 1]


def models(results: Path) -> str:
    """Table with one row per model."""
    rows = []
    for _, row in screened(table_of(results)).iterrows():
        cells = [row.setting, with_sem(row.to_ridge, row.to_ridge_sem, 2)]
        if row.n_heads == 1:
            rows.append((*cells, *[""] * 6, held(row)))
            continue
        medians = " (medians)" * (row.to_single_2d_by == "median")
        cells.append(with_sem(row.to_single_2d, row.to_single_2d_sem, 2) + medians)
        cells.append(at_work(row))
        refitted = [f"{name}_refit" for name in ("later", "pairs", "first")]
        cells.append(f"{row.later_median:.3g}")
        cells += [f"{row[name]:.3g} ± {row[f'{name}_sem']:.1g}" for name in refitted]
        rows.append((*cells, held(row)))
    header = (
        "setting",
        "risk / ridge",
        "risk / a single head's, L = 2 d_x",
        "heads at work, by layer",
    )
    header += ("one head per later layer: median risk / whole model's", "risk, refitted")
    return markdown((*header, "a pair, refitted", "one head in layer 1, refitted", "holds"), rows)


def held(row: pd.Series) -> str:
    """The claims that hold for a model."""
    found = [claim.replace("_pairs", " (pairs)") for claim in CLAIMS if row[claim] in (True,)]
    return ", ".join(found) or "none"


def claims(results: Path) -> str:
    """Table with one row per claim: number of settings in which it holds."""
    found = several(screened(table_of(results)))
    rows = []
    for claim, (asked, what, column) in CLAIMS.items():
        judged = found.dropna(subset=[claim])
        measured = f"{what}: {between(judged[column])}" if column else ""
        count = f"{int(judged[claim].sum())} of {len(judged)}"
        rows.append((claim.replace("_pairs", " (pairs)"), asked, measured, count))
    return markdown(("claim", "what it says", "measured", "holds"), rows)


def wide_inputs(results: Path) -> str:
    """Models of several heads with d_x of at least 16, compared with Algorithm 1, and the output of
    layer 1."""
    rows = []
    for _, row in several(table_of(results)).query("d_x >= 16").iterrows():
        cells = [row.setting, f"{row.steps:,}", with_sem(row.to_ridge, row.to_ridge_sem, 2)]
        cells += [with_sem(row.to_algorithm_fixed, row.to_algorithm_fixed_sem, 2)]
        cells += [f"{row.to_algorithm:.1f}", at_work(row)]
        cells += [f"{row[name]:.2f}" for name in ("later_refit", "first_refit", "r2_R x")]
        rows.append((*cells, f"{row['r2_(S - 1) x']:.2f}"))
    header = ("setting", "steps", "risk / ridge", "risk / Algorithm 1 in as few steps")
    header += ("risk / Algorithm 1 at its best step", "heads at work, by layer")
    header += ("one head per later layer, refitted", "one head in layer 1, refitted")
    return markdown((*header, "R² of R x", "R² of (S − 1) x"), rows)


def at_work(row: pd.Series) -> str:
    """Number of heads at work in each layer, by medians."""
    return ", ".join(f"{row[f'n_eff_{layer}_median']:.1f}" for layer in range(1, row.n_layers + 1))


def seeds(results: Path) -> str:
    """Settings with several seeds: means over seeds with standard errors, and how often claims
    hold."""
    found = several(table_of(results))
    found = found[found.steps == found.steps.min()]
    rows = []
    for name, group in found.groupby("setting", sort=False):
        if len(group) == 1:
            continue
        layers = [f"n_eff_{layer}_median" for layer in range(1, group.n_layers.iloc[0] + 1)]
        cells = [name, str(len(group))]
        cells += [over(group[column], 2) for column in ("to_single_2d", *layers, "later_refit")]
        cells.append(span(group.first_refit, ".2f"))
        counts = [f"{claim} {int(group[claim].sum())}" for claim in ("C9", *PATTERN, "C13")]
        rows.append((*cells, ", ".join(counts)))
    header = ("setting", "seeds", "risk / a single head's, L = 2 d_x")
    header += tuple(f"heads at work, layer {layer}" for layer in (1, 2, 3))
    header += ("one head per later layer, refitted", "one head in layer 1, refitted", "holds in")
    return markdown(header, rows)


def over(values: pd.Series, digits: int) -> str:
    """Mean and its standard error."""
    return with_sem(values.mean(), values.sem(), digits)


def steps(results: Path) -> str:
    """Effect of twice as many steps, one row per model."""
    found = table_of(results)
    longer = found.dropna(subset=["to_fewer_steps"])
    rows = []
    for _, row in longer.iterrows():
        same = (found.setting == row.setting) & (found.seed == row.seed)
        shorter = found[same & (found.steps < row.steps)].nlargest(1, "steps").iloc[0]
        cells = (
            row.setting,
            f"{row.steps:,}",
            with_sem(row.to_fewer_steps, row.to_fewer_steps_sem, 3),
        )
        rows.append((*cells, held(shorter), held(row)))
    header = ("setting", "steps", "risk / after half of them", "holds at half", "holds at the end")
    return markdown(header, rows)


def between(values: pd.Series) -> str:
    """Range from smallest to largest.

    Example:
        >>> between(pd.Series([1.0, 2.5]))
        '1.00 to 2.50'
    """
    return f"{values.min():.2f} to {values.max():.2f}"


def pattern(found: pd.DataFrame) -> pd.DataFrame:
    """Models with the whole pattern: C10, C11 and C12."""
    return found[found[list(PATTERN)].all(axis=1)]


def importance(row: pd.Series) -> np.ndarray:
    """Shares of the heads of each layer, [layer, head]."""
    layers = [row[f"importance_{layer}"] for layer in range(1, row.n_layers + 1)]
    return np.array([[float(share) for share in shares.split()] for shares in layers])


def figure(results: Path, shown: list[str]) -> go.Figure:
    """Importance of heads, layers by heads, for these models side by side."""
    found = table_of(results).set_index("model")
    rows = [found.loc[name] for name in shown]
    titles = [row.setting.replace("; ", "<br>") for row in rows]
    drawn = make_subplots(1, len(rows), subplot_titles=titles)
    for column, row in enumerate(rows, 1):
        shares = importance(row)
        heatmap = go.Heatmap(
            z=shares,
            x=[str(head) for head in range(shares.shape[1])],
            y=[f"layer {layer}" for layer in range(1, len(shares) + 1)],
            text=[[f"{share:.2f}" if share >= 0.01 else "" for share in line] for line in shares],
            texttemplate="%{text}",
            coloraxis="coloraxis",
            xgap=2,
            ygap=2,
        )
        drawn.add_trace(heatmap, row=1, col=column)
    drawn.update_xaxes(title_text="head")
    drawn.update_yaxes(autorange="reversed", showticklabels=False)
    drawn.update_yaxes(showticklabels=True, col=1)
    return drawn.update_layout(
        title={"text": "Share of each head in what masking a head of its layer costs", "y": 0.96},
        coloraxis={"colorscale": "Blues", "cmin": 0, "cmax": 1, "showscale": False},
        template="plotly_white",
        margin={"t": 150},
    )


if __name__ == "__main__":
    picture = RESULTS / "sparse_settings-importance.png"
    figure(RESULTS, list(SHOWN)).write_image(picture, width=1400, height=400)
