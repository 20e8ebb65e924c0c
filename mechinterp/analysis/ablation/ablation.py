"""Cost of masking, one row per question, and the overview that a page shows: the result of `ablate`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float

from mechinterp import figures, heatmaps
from mechinterp.analysis.ablation.kinds import QUESTIONS
from mechinterp.analysis.ablation.measured import EXCESS
from mechinterp.analysis.ablation.shares import effective_number, layer_shares
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import HEAD_COLUMNS, METRIC_UNIT, Table, records, tables_of
from mechinterp.display import Result, head_names


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Ablation(Result):
    """Cost of masking: weighted sums of a metric under masks, one row per question, on the same prompts."""

    COLUMNS: ClassVar = HEAD_COLUMNS | {
        "method": '"zero": the output is 0; "mean": its mean over prompts at that position; "resample": its value in another prompt.',
        "other": "The other head of the pair.",
        "block": "Number of the block, from 0.",
        "kept": "Heads that are not masked.",
        "n_kept": "Number of heads that are not masked.",
        "masked_next": "Head that is masked next.",
        "pos": "Position of the prompt: x1, y1, ... for tokens in turn; 1, 2, ..., query for pairs; 0, 1, ... for others.",
        "risk": "Metric with the mask.",
        "ratio": "Metric with the mask divided by that of the full model.",
        "rise": "Metric with the mask minus that of the full model.",
        "rise_sem": "Standard error of rise, paired: the same prompts for every mask. Often too small if few prompts carry the rise.",
        "interaction": "rise(a, b) - rise(a) - rise(b): positive for heads that replace each other, negative for heads that work only together.",
        "shapley": "Fall of the metric due to a head, averaged over all orders of adding heads. The values sum to the metric without heads minus that with all.",
        "median_rise": "Median of the rise over prompts; a few prompts do not move it.",
        "median_interaction": "Median of the interaction over prompts.",
        "median_shapley": "Median of the Shapley value over prompts.",
        "carried_by_few": "True if 1% of the prompts make up more than half of the mean size; the median then says more.",
        "importance": "Share of the head in the rises of its layer, negative rises counted as 0.",
        "effective_heads": "exp of the entropy of the importance: 1 if one head counts, all if they count equally, 0 if none counts.",
        "layer_rise": "Metric with all heads of the layer masked minus that of the full model.",
    }
    """Meaning and unit of each column."""
    UNITS: ClassVar = {
        METRIC_UNIT: (
            *("risk", "rise", "interaction", "shapley", "layer_rise"),
            *("median_rise", "median_interaction", "median_shapley"),
        )
    }

    what: str
    """Kind of mask: a name in `QUESTIONS`."""
    methods: tuple[str, ...]
    """Methods of masking, in the order of the rows."""
    rows: pd.DataFrame
    """Method of each row, and the columns of the kind."""
    columns: Mapping[str, Float[np.ndarray, " row"]]
    """Contrasts by name, each with its standard error `NAME_sem` and the last one with its median `median_NAME`."""
    few: Bool[np.ndarray, " row"]
    """True if 1% of the prompts make up more than half of the mean size of the row's last contrast."""
    full_risk: float
    """Metric of the full model, unit of the metric."""
    full_risk_sem: float
    null_risk: float
    """Metric of predicting 0, unit of the metric."""
    metric: str = EXCESS.name
    """Name of the metric. The excess risk is the mean of (y_hat - y_query_clean)^2."""
    unit: str = EXCESS.unit
    """Unit of the metric; empty if unknown."""
    others: Mapping[str, "Ablation"] = field(default_factory=dict)
    """Further questions of an overview, by kind: layers, or subsets and Shapley values."""
    outputs: Mapping[str, Float[np.ndarray, "..."]] = field(default_factory=dict)
    """For the switches of a page, on the first prompts: "outputs" [prompt, head, d_y], their "rest" [d_y], which no head
    adds, and the "target" [prompt, d_y]; all in units of y."""

    @property
    def main(self) -> str:
        """Name of the last contrast, which the sentence is about."""
        return next(name.removeprefix("median_") for name in self.columns if "median_" in name)

    def grid(self, column: str) -> np.ndarray:
        """A column as an array: an axis of methods if there are several, then one for each column that names a row.

        A table that is no grid, such as that of pairs or subsets, has one axis.

        Raises:
            ValueError: If there is no such column.
        """
        frame = self.rows.assign(**self.columns, carried_by_few=self.few)
        if column not in frame:
            raise ValueError(f"column must be one of {', '.join(frame)}, got {column!r}.")
        kind = QUESTIONS[self.what]
        shape = [self.rows[name].nunique() for name in kind.axes] if kind.is_grid else [-1]
        methods = [len(self.methods)] if len(self.methods) > 1 else []
        return frame[column].to_numpy().reshape(*methods, *shape)

    @property
    def rise(self) -> Float[np.ndarray, "*axes"]:
        """Metric with the mask minus that of the full model, unit of the metric; axes as in `grid`."""
        return self.grid("rise")

    @property
    def rise_sem(self) -> Float[np.ndarray, "*axes"]:
        """Standard error of `rise`, paired: the same prompts for every mask."""
        return self.grid("rise_sem")

    @property
    def layer_rise(self) -> Float[np.ndarray, " layer"]:
        """`rise` without all heads of a layer, under the first method; NaN if layers were not masked."""
        return self._of_layers("rise")

    @property
    def layer_rise_sem(self) -> Float[np.ndarray, " layer"]:
        """Standard error of `layer_rise`, paired."""
        return self._of_layers("rise_sem")

    def _of_layers(self, column: str) -> Float[np.ndarray, " layer"]:
        layers = self.others.get("layers")
        return np.full(1, np.nan) if layers is None else layers.columns[column]

    @property
    def carried_by_few(self) -> Bool[np.ndarray, "*axes"]:
        """True if 1% of the prompts make up more than half of the mean size; the median then says more."""
        return self.grid("carried_by_few")

    @property
    def importance(self) -> Float[np.ndarray, "*axes layer head"]:
        """Each head's share of its layer's rises, negative rises counted as 0; all 0 if no head counts."""
        return layer_shares(self.rise)

    @property
    def effective_heads(self) -> Float[np.ndarray, "*axes layer"]:
        """exp of the entropy of `importance`: 1 if one head counts, n_heads if all count equally, 0 if none counts."""
        return effective_number(self.rise)

    @property
    def breaking(self) -> list[str]:
        """Rows of the first method without which the model is worse than predicting 0, if the full model is better."""
        first = self._of_method(0)
        worse = (self.full_risk + first["rise"] > self.null_risk) & (
            self.full_risk <= self.null_risk
        )
        return [self._label(row) for row in first[worse].to_dict("records")]

    @property
    def needed(self) -> int:
        """For the greedy order: smallest number of heads with which the metric is at most twice that of the full model."""
        n_kept = self.rows["n_kept"]
        enough = (self.columns["risk"] <= 2 * self.full_risk) | (n_kept == n_kept.max())
        return int(n_kept[enough].min())

    @property
    def headline(self) -> str:
        """Metric of the full model."""
        risk = with_error(self.full_risk, self.full_risk_sem)
        return f"{self.metric} {risk} {self.unit}".strip()

    def __repr__(self) -> str:
        return (
            f"Ablation({self.what}: {self.headline}; {'; '.join(map(self._largest, self.methods))})"
        )

    def _largest(self, method: str) -> str:
        """The largest entry of a method, and its median if few prompts carry it."""
        name = self.main
        if self.what == "greedy":
            return (
                f"{self.needed} of {self.rows['n_kept'].max()} heads needed for at most twice that"
            )
        frame = self._of_method(self.methods.index(method))
        size = frame[name].abs() if name == "interaction" else frame[name]
        row = frame.loc[size.idxmax()].to_dict()
        value = f"{name} {with_error(row[name], row[f'{name}_sem'])}"
        if row["carried_by_few"]:
            value = f"median {digits(row[f'median_{name}'])}, mean {value}, carried by few prompts"
        return f"{method} {self._label(row)} {value}"

    def _label(self, row: Mapping[str, Any]) -> str:
        return QUESTIONS[self.what].label.format(**row)

    def _of_method(self, number: int) -> pd.DataFrame:
        frame = self.to_frame()
        return frame[frame["method"] == self.methods[number]]

    def sentences(self) -> list[str]:
        """Metric of the full model, the largest row, and what needs care."""
        sentences = [f"{self.headline}."]
        first = self._of_method(0)
        if self.what not in ("heads", "blocks"):
            sentences += [
                f"{self._largest(each)} {self.unit}".strip() + "." for each in self.methods
            ]
        else:
            row = first.loc[first["rise"].idxmax()].to_dict()
            raises = "raises it most" if row["rise"] > 0 else "lowers it least, as every mask does"
            rise = with_error(abs(row["rise"]), row["rise_sem"])
            sentences.append(
                f"Masking {self._label(row)} {raises}, by {f'{rise} {self.unit}'.strip()} in the mean over prompts; "
                f"the median rise is {digits(row['median_rise'])}."
            )
            if self.breaking:
                nothing = f"{digits(self.null_risk)} {self.unit}".strip()
                sentences.append(
                    f"Without one of {', '.join(self.breaking)} the model is worse than predicting 0 ({nothing})."
                )
        carried = self.to_frame()[self.few].to_dict("records")
        if carried:
            names = ", ".join(f"{self._label(row)} ({row['method']})" for row in carried[:12])
            more = f" and {len(carried) - 12} more" if len(carried) > 12 else ""
            sentences.append(
                f"1% of the prompts make up most of the mean of {names}{more}: read the median."
            )
        return sentences

    def to_frame(self) -> pd.DataFrame:
        """One row per method and question; the median comes first if few prompts carry a mean."""
        columns = dict(self.columns)
        median = f"median_{self.main}"
        if self.few.any():
            columns = {median: columns.pop(median)} | columns
        frame = self.rows.assign(**columns, carried_by_few=self.few)
        if self.what in ("heads", "blocks"):
            frame["importance"] = self.importance.ravel()
        return frame

    def layer_frame(self) -> pd.DataFrame:
        """One row per layer, under the first method: its number of effective heads, and the rise without all of them."""
        effective = self.effective_heads if len(self.methods) == 1 else self.effective_heads[0]
        frame = pd.DataFrame({"layer": range(len(effective)), "effective_heads": effective})
        if "layers" not in self.others:
            return frame
        return frame.assign(layer_rise=self.layer_rise, layer_rise_sem=self.layer_rise_sem)

    def tables(self) -> dict[str, Table]:
        """The rows; for an overview also layers, Shapley values and subsets."""
        title = self._title()
        quiet = ("carried_by_few",)
        if self.what != "heads":
            named = self.to_frame()
            named = named.drop(columns="method") if len(self.methods) == 1 else named
            return {self.what: Table(named, title, by=self.main, quiet=quiet)}
        own = Table(self.to_frame(), title, by="median_rise", per="method", quiet=quiet)
        layers = Table(self.layer_frame(), f"Layers ({self.methods[0]} ablation)")
        further = {
            name: table
            for kind in ("shapley", "subsets")
            if kind in self.others
            for name, table in tables_of(kind, self.others[kind]).items()
        }
        return {"ablation": own, "layers": layers, **further}

    def _title(self) -> str:
        text = QUESTIONS[self.what].title.format(metric=self.metric)
        return text[0].upper() + text[1:]

    def to_document(self) -> dict:
        """Metric of the full model and of predicting 0, and the rows of all tables."""
        tables = {"heads" if n == "ablation" else n: t for n, t in self.tables().items()}
        name = self.metric.replace(" ", "_")
        breaking = {"breaking": self.breaking} if self.what == "heads" else {}
        return {
            name: self.full_risk,
            f"{name}_sem": self.full_risk_sem,
            "null_risk": self.null_risk,
            **breaking,
            **{key: records(table.frame) for key, table in tables.items()},
        }

    def head_facts(self) -> list[dict[str, str]]:
        """Rise of each head under each method, and its Shapley value."""
        if self.what != "heads":
            return []
        unit = f" ({self.unit})" if self.unit else ""
        rows: list[dict[str, str]] = [{} for _ in range(len(self.rows) // len(self.methods))]
        for number, method in enumerate(self.methods):
            frame = self._of_method(number)
            for row, rise, sem in zip(rows, frame["rise"], frame["rise_sem"], strict=True):
                row[f"{method} ablation{unit}"] = with_error(rise, sem)
        if "shapley" in self.others:
            found = self.others["shapley"].columns
            for row, value, sem in zip(rows, found["shapley"], found["shapley_sem"], strict=True):
                row[f"Shapley value{unit}"] = with_error(value, sem)
        return rows

    def switches(self) -> dict[str, object] | None:
        """Numbers for switches of the heads of one layer: risk of each subset, outputs on a few prompts; None if there are none."""
        if not self.outputs:
            return None
        heads = head_names((1, len(self.rows) // len(self.methods)))
        table = self.others["subsets"].to_frame()
        said = {
            "".join(str(int(head in kept.split())) for head in heads): with_error(risk, sem)
            for kept, risk, sem in zip(table["kept"], table["risk"], table["risk_sem"], strict=True)
        }
        return {"said": said, **{name: values.tolist() for name, values in self.outputs.items()}}

    def plot(self) -> go.Figure:
        """Layers by heads, heads by heads or heads by positions; a curve for the greedy order; else one bar per row."""
        title = self._title()
        if self.what == "pairs":
            return self._plot_pairs(title)
        if self.what == "positions":
            return self._plot_positions(title)
        if self.what == "greedy":
            return self._plot_greedy(title)
        if self.what in ("heads", "blocks") and self.grid("rise").shape[-2] > 1:
            return self._plot_layers(title)
        name = "risk" if self.what == "subsets" else self.main
        frames = [self._of_method(number) for number in range(len(self.methods))]
        labels = [self._label(row) for row in frames[0].to_dict("records")]
        groups = {
            f"{method} ablation": (frame[name].to_numpy(), frame[f"{name}_sem"].to_numpy())
            for method, frame in zip(self.methods, frames, strict=True)
        }
        y_title = self._in_unit({"risk": "", "rise": "rise of ", "shapley": "fall of "}[name])
        return figures.bars(labels, groups, title=title, y_title=y_title)

    def _in_unit(self, change: str) -> str:
        return f"{change}{self.metric} ({self.unit})" if self.unit else f"{change}{self.metric}"

    def _plot_layers(self, title: str) -> go.Figure:
        """Layers by heads under the first method; colours end where the model is no better than predicting 0."""
        rise = self.rise if len(self.methods) == 1 else self.rise[0]
        end = self.null_risk - self.full_risk
        ends = 0 < end < np.abs(rise).max()
        title = f"{title} ({self.methods[0]} ablation)"
        return heatmaps.heatmap(
            rise,
            title=f"{title} (full colour: no better than predicting 0)" if ends else title,
            unit=self.unit,
            limit=end if ends else None,
        )

    def plot_importance(self) -> go.Figure:
        """Importance within the layer under the first method, layers by heads."""
        shares = self.importance if len(self.methods) == 1 else self.importance[0]
        title = f"Importance: share of the layer's rise ({self.methods[0]} ablation)"
        return heatmaps.heatmap(shares, title=title, unit="share", signed=False)

    def _plot_pairs(self, title: str) -> go.Figure:
        names = list(dict.fromkeys([*self.rows["head"], *self.rows["other"]]))
        matrix = pd.DataFrame(0.0, index=names, columns=names)
        for row in self._of_method(0).itertuples():
            matrix.loc[row.head, row.other] = matrix.loc[row.other, row.head] = row.interaction
        return heatmaps.heatmap(
            matrix.to_numpy(), title=title, rows=names, columns=names, unit=self.unit
        )

    def _plot_positions(self, title: str) -> go.Figure:
        frame = self._of_method(0)
        names = list(dict.fromkeys(frame["pos"]))
        matrix = frame["rise"].to_numpy().reshape(-1, len(names))
        heads = [
            f"L{layer}H{head}" for layer, head in frame[["layer", "head"]].drop_duplicates().values
        ]
        return heatmaps.heatmap(matrix, title=title, rows=heads, columns=names, unit=self.unit)

    def _plot_greedy(self, title: str) -> go.Figure:
        frame = self._of_method(0)
        curve = (frame["risk"].to_numpy(), frame["risk_sem"].to_numpy())
        return figures.lines(
            frame["n_kept"].to_numpy(),
            {"greedy order": curve},
            title=title,
            x_title="heads kept",
            y_title=self._in_unit(""),
            log_y=True,
        )

    def figures(self) -> dict[str, go.Figure]:
        """The rows; for an overview also Shapley values of one layer, or the importance of several."""
        if not self.others:
            return {"ablation" if self.what == "heads" else self.what: self.plot()}
        if "shapley" in self.others:
            return {"ablation": self.plot(), "shapley": self.others["shapley"].plot()}
        if len(self.layer_frame()) == 1:
            return {"ablation": self.plot()}
        return {"ablation": self.plot(), "head_importance": self.plot_importance()}
