"""Losses and heads at the saved steps of a run of files, or of a module watched by a monitor."""

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import plotly.graph_objects as go

from mechinterp import figures
from mechinterp.analysis.number_format import with_error
from mechinterp.display import Result

OF_HEADS = {
    "share": "Share of each head",
    "rise": "Rise of the excess risk without the head (y²)",
    "omega": "omega of each head (1/x²)",
    "mu": "mu of each head",
}
"""Columns of the history that are plotted."""


@dataclass(frozen=True, eq=False, repr=False)
class RunOverTraining(Result):
    """Losses and heads at each saved step, on the same prompts."""

    history: pd.DataFrame
    """One row per step and head."""
    COLUMNS: ClassVar = {
        "loss": "NaN: training losses are not stored in files; unit y^2.",
        "eval_loss": "Loss on the same prompts at every step, unit y^2.",
        "share": "Standard deviation of the head's output, divided by the sum of these over its layer's heads.",
        "rise": "Rise of the excess risk when the head is masked, unit y^2.",
        "omega": "Mean of omega over coordinates, unit 1/x^2.",
        "mu": "Diagonal of OV on y, mean over responses.",
        "qk_diagonal": "Norm of the diagonal of QK's x block over that of the block; 1 if the block is diagonal.",
        "ov_last_entry": "Norm of mu over that of OV; 1 if only y is read.",
        "qk_norm": "Frobenius norm of the head's QK, scale included.",
        "ov_norm": "Frobenius norm of the head's OV.",
    }

    def __repr__(self) -> str:
        steps = self.history["step"].unique()
        return f"RunOverTraining({len(steps)} saved steps, {steps[0]:,} to {steps[-1]:,})"

    def sentences(self) -> list[str]:
        """Steps, and the loss at the last step."""
        steps, last = self.history["step"].unique(), self.history.iloc[-1]
        loss = with_error(last["eval_loss"], last["eval_loss_sem"])
        return [
            f"{len(steps)} saved steps, {steps[0]:,} to {steps[-1]:,}; loss at the end {loss} y².",
            "All steps are read in the same way and run on the same prompts. Numbers of steps come from the names of "
            "the files or from the training loop.",
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per step and head."""
        return self.history

    def tables(self) -> dict[str, pd.DataFrame]:
        """Table of all saved steps."""
        return {"history": self.history}

    def figures(self) -> dict[str, go.Figure]:
        """Loss, then the columns of the heads."""
        names = [name for name in OF_HEADS if name in self.history]
        return {"loss": self.plot()} | {name: self.plot_heads(name) for name in names}

    def plot(self) -> go.Figure:
        """Loss over the steps."""
        per_step = self.history.drop_duplicates("step")
        return figures.lines(
            per_step["step"].to_numpy(),
            {"eval_loss": tuple(per_step[["eval_loss", "eval_loss_sem"]].to_numpy().T)},
            title="Loss during training, on the same prompts at every step",
            x_title="step",
            y_title="loss (y²)",
        )

    def plot_heads(self, name: str) -> go.Figure:
        """A column of the history over the steps, one curve per head."""
        several = self.history["layer"].any()
        heads = {
            f"L{layer}H{head}" if several else f"head {head}": rows[name].to_numpy()
            for (layer, head), rows in self.history.groupby(["layer", "head"])
        }
        return figures.lines(
            self.history["step"].unique(),
            heads,
            title=f"{OF_HEADS[name]} during training",
            x_title="step",
            y_title=OF_HEADS[name],
            zero_line=True,
        )
