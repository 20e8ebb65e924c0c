"""The part of the page about training: a slider over the kept steps, and the curves of the history."""

from mechinterp.analysis.dynamics import training_dynamics
from mechinterp.analysis.linear_snapshots import linear_snapshots
from mechinterp.analysis.snapshots import Snapshots, training_snapshots
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.config import TrainConfig
from mechinterp.report.sections import Section

STEPS = "Training, step by step"
MOVE = "Move the slider, or use the arrow keys on it."
METHOD = (
    "Circuits of the weights kept at each step, on one colour scale; each is classified as the model above is. "
    "The loss is the eval_loss of the last logged step up to there."
)
LINEAR_METHOD = (
    " Dotted: the loss with 0, 1, ... principal components learned, in closed form; dashed: jumps foretold from the "
    "initial weights. With M = Σ v K^T Q over heads, a component of the covariance is learned to f = e^T M e "
    "over its value at the optimum, and counts above one half; a head adds v (K e)^T (Q e) to that. Of heads of rank "
    "two and more the norms of K e and Q e are shown."
)


def training_sections(checkpoint: Checkpoint, *, seed: int = 0) -> list[Section]:
    """What a checkpoint's snapshots and history allow: two sections, one or none."""
    sections = []
    if checkpoint.snapshots:
        sections.append(_steps(checkpoint, seed))
    if checkpoint.history is not None:
        sections.append(_curves(checkpoint))
    return sections


def _steps(checkpoint: Checkpoint, seed: int) -> Section:
    found, config = training_snapshots(checkpoint, seed=seed), checkpoint.config
    circuits = {"snapshot_qk": found.plot(), "snapshot_ov": found.plot_ov()}
    tables = {"snapshots": found.to_frame()}
    kept = f"{len(found.step)} kept steps"
    if config.model.score != "linear/L" or config.task.d_y > 1 or config.task.supports is not None:
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


def _curves(checkpoint: Checkpoint) -> Section:
    assert checkpoint.history is not None
    dynamics = training_dynamics(checkpoint.history)
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
