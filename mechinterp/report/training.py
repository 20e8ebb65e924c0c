"""Sections of the page about training: a slider over the kept steps, and the curves of the history."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechinterp import figures
from mechinterp.analysis.training.deep_snapshots import N_PROMPTS as N_SNAPSHOTS
from mechinterp.analysis.training.deep_snapshots import deep_snapshots
from mechinterp.analysis.training.linear_components import linear_snapshots
from mechinterp.analysis.training.over_training import training_dynamics
from mechinterp.analysis.training.snapshots import Snapshots, training_snapshots
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.config import TrainConfig
from mechinterp.report.parts import Section
from mechinterp.report.subject import Subject

STEPS = "Training, step by step"
MOVE = "Move the slider, or use the arrow keys on it."
METHOD = (
    "Circuits of the weights kept at each step, on one colour scale; each is classified as the model above is. "
    "The loss is the eval_loss of the last logged step up to there."
)
LINEAR_METHOD = (
    " Dotted: the loss with 0, 1, ... principal components learned, in closed form; dashed: jumps predicted from the "
    "initial weights. With M = Σ v K^T Q over heads, a component of the covariance is learned to f = e^T M e "
    "over its value at the optimum, and counts above one half; a head adds v (K e)^T (Q e) to that. Of heads of rank "
    "two and more the norms of K e and Q e are shown."
)
OF_HEADS = {
    "share": "Share of each head",
    "rise": "Rise of the excess risk without the head (y²)",
    "omega": "omega of each head (1/x²)",
    "mu": "mu of each head",
}
"""Columns of the history of a run of files."""
NORMS = {"qk_norm": "QK", "ov_norm": "OV"}
LOSSES = {
    "eval_loss": "Loss during training, on prompts that training never sees",
    "loss": "Training loss, mean since the row before",
}


def history_sections(subject: Subject) -> list[Section]:
    """The curves of the history, if there is one."""
    history = subject.checkpoint.history
    if history is None:
        return []
    if "eval_loss_sem" in history:
        return [_curves_of_run(history)]
    curves = _curves if "omega" in history else _curves_of_norms
    return [curves(checkpoint_of(subject.checkpoint, "training"), history)]


def steps_section(subject: Subject) -> Section:
    """The kept steps of training of one layer of attention."""
    checkpoint = checkpoint_of(subject.checkpoint, "snapshots")
    config = checkpoint.config
    found = training_snapshots(checkpoint, seed=subject.seed, progress=subject.progress)
    circuits = {"snapshot_qk": found.plot(), "snapshot_ov": found.plot_ov()}
    tables = {"snapshots": found.to_frame()}
    kept = f"{len(found.step)} kept steps"
    several = config.task.d_y > 1 or config.task.supports is not None
    if config.model.score != "linear/L" or several or checkpoint.kept:
        return Section(
            STEPS,
            f"{kept}: {_told(found)}. {MOVE}",
            METHOD,
            {"snapshot_loss": found.plot_loss(), **circuits},
            tables,
        )
    linear = linear_snapshots(checkpoint)
    pictures = {
        "snapshot_loss": linear.plot(),
        "snapshot_learned": linear.plot_learned(),
        "snapshot_heads": linear.plot_heads(),
    }
    return Section(
        STEPS,
        f"{kept}; at the end {linear.algorithm(-1)}. {linear.forecast} {MOVE}",
        METHOD + LINEAR_METHOD,
        pictures | circuits,
        tables | {"components": linear.to_frame()},
    )


def _told(found: Snapshots) -> str:
    """The patterns in the order in which they come, each with its first step."""
    changes = [
        f"{pattern} from step {step:,}"
        for before, pattern, step in zip(
            ("", *found.pattern), found.pattern, found.step, strict=False
        )
        if pattern != before
    ]
    return ", ".join(changes)


def _curves_of_run(history: pd.DataFrame) -> Section:
    """Of a run of files of weights, or of a module that was watched: nobody knows how it was trained."""
    per_step = history.drop_duplicates("step")
    last = per_step.iloc[-1]
    loss = figures.lines(
        per_step["step"].to_numpy(),
        {"eval_loss": per_step["eval_loss"].to_numpy()},
        errors={"eval_loss": per_step["eval_loss_sem"].to_numpy()},
        title="Loss during training, on the same prompts at every step",
        x_title="step",
        y_title="loss (y²)",
    )
    pictures = {"loss": loss} | {
        name: _head_curves(history, name, title)
        for name, title in OF_HEADS.items()
        if name in history
    }
    return Section(
        "Training",
        f"{len(per_step)} kept steps, {per_step['step'].iloc[0]:,} to {last['step']:,}; loss at the end "
        f"{last['eval_loss']:.4f} ± {last['eval_loss_sem']:.2g} y².",
        "From the weights kept at each step, read in one way, on the same prompts; the numbers of the steps are those of "
        "the files' names or of the training loop. A head's share is the standard deviation of what it adds to the "
        "prediction over the sum of that over its layer's heads; the rise is that of the excess risk without it.",
        pictures,
        {"history": history},
    )


def _head_curves(history: pd.DataFrame, name: str, title: str) -> go.Figure:
    """A curve per head."""
    heads = {
        f"L{layer}H{head}" if history["layer"].any() else f"head {head}": rows[name].to_numpy()
        for (layer, head), rows in history.groupby(["layer", "head"])
    }
    return figures.lines(
        history["step"].unique(),
        heads,
        title=f"{title} during training",
        x_title="step",
        y_title=title,
        zero_line=True,
    )


def _curves(checkpoint: Checkpoint, history: pd.DataFrame) -> Section:
    dynamics = training_dynamics(history)
    train = checkpoint.config.train
    prompts = (
        f"{train.n_eval_prompts} fixed prompts" if train.optimizer == "adam" else "the population"
    )
    return Section(
        "Training",
        f"{checkpoint.step} steps; final loss on {prompts} {dynamics.eval_loss[-1]:.4f} y².",
        _method(train),
        {"omega": dynamics.plot(), "mu": dynamics.plot_mu(), "loss": dynamics.plot_loss()},
        {"history": dynamics.to_frame()},
    )


def _method(train: TrainConfig) -> str:
    rows = f"a row every {train.log_every} steps"
    if train.optimizer == "adam":
        return (
            f"Adam, step size {train.learning_rate:g}, {train.batch_size} fresh prompts a step; {rows}. loss is the "
            "mean since the row before, eval_loss is on prompts training never sees."
        )
    how = {
        "gradient_flow": "Exact gradient flow on the population, as long as descent of",
        "gradient_descent": "Full-batch gradient descent of",
    }[train.optimizer]
    return (
        f"{how} step size {train.learning_rate:g}; {rows}. loss is that of the data trained on at the step itself, "
        "eval_loss that of the population; both are exact."
    )


def deep_steps_section(subject: Subject) -> Section:
    """The kept steps of training, by the heads that each layer needs."""
    n_prompts = subject.at_most(N_SNAPSHOTS)
    found = deep_snapshots(
        subject.checkpoint, n_prompts=n_prompts, seed=subject.seed, progress=subject.progress
    )
    first = ", ".join(
        f"{number:.1f} at step {step:,}"
        for step, number in zip(found.step, found.effective_heads[:, 0], strict=True)
        if step
    )
    return Section(
        STEPS,
        f"{len(found.step)} kept steps. Effective heads of the first layer: {first}. {MOVE}",
        f"Zero ablation of every head of the weights kept at each step, on the same {n_prompts} prompts; importance is a "
        "head's share of its layer's rises, falls taken as 0. The loss is the eval_loss of the last logged step up to there.",
        {"snapshot_loss": found.plot_loss(), "snapshot_importance": found.plot()},
        {"snapshots": found.to_frame()},
    )


def _curves_of_norms(checkpoint: Checkpoint, history: pd.DataFrame) -> Section:
    train = checkpoint.config.train
    norms = _norms(history)
    text = (
        f"{checkpoint.step} steps; final loss on {train.n_eval_prompts} fixed prompts "
        f"{history['eval_loss'].iloc[-1]:.4f} y²."
    )
    pictures = {name: _loss_curve(history, name) for name in LOSSES}
    for name, what in NORMS.items():
        factors = norms.groupby("layer")[f"{name}_factor"].median()
        told = ", ".join(f"{factor:.3g}" for factor in factors)
        text += (
            f" The norm of {what} of the median head ends at {told} times its first value, layer by layer: it has "
            f"changed most in layer {np.abs(np.log(factors)).idxmax()}."
        )
        pictures[name] = _norm_curves(history, name, what)
    return Section(
        "Training",
        text,
        f"{_method(train)} Norms are Frobenius norms, that of QK with the scale in it; a curve is their root mean square "
        "over the heads of a layer.",
        pictures,
        {"norms": norms, "history": history},
    )


def _norms(history: pd.DataFrame) -> pd.DataFrame:
    """One row per head: its norms at the first and the last logged step, and the factor between them."""
    heads = history.groupby(["layer", "head"])
    table: dict[str, pd.Series] = {}
    for name in NORMS:
        first, last = heads[name].first(), heads[name].last()
        table |= {f"{name}_first": first, name: last, f"{name}_factor": last / first}
    return pd.DataFrame(table).reset_index()


def _norm_curves(history: pd.DataFrame, name: str, what: str) -> go.Figure:
    """A curve per layer."""
    later = history[history["step"] > 0]  # step 0 has no place on a logarithmic axis
    squares = later.assign(square=later[name] ** 2).groupby(["step", "layer"])["square"].mean()
    table = np.sqrt(squares).unstack()
    return figures.lines(
        table.index.to_numpy(),
        {f"layer {layer}": table[layer].to_numpy() for layer in table},
        title=f"Norm of {what} during training, layer by layer",
        x_title="step",
        y_title=f"norm of {what}",
        log_x=True,
    )


def _loss_curve(history: pd.DataFrame, name: str) -> go.Figure:
    # One figure each: a training loss with spikes would leave no room for the other.
    per_step = history.drop_duplicates("step").iloc[1:]
    return figures.lines(
        per_step["step"].to_numpy(),
        {name: per_step[name].to_numpy()},
        title=LOSSES[name],
        x_title="step",
        y_title="loss (y²)",
        log_x=True,
        log_y=True,
    )
