"""Pruning: rules that choose heads, the cost of masking the others, and the smaller model: its checkpoint and its further
training beside the full model.

Cross-fitting: heads are chosen on random halves of the prompts, and their cost is measured on the
other halves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int

from mechinterp import figures, heatmaps
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.probing.linear import cross_validated
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import (
    carried_by_few,
    estimates,
    mean_and_sem,
    random_halves,
    ratio_and_sem,
)
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of, save
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.native.folder import require_new
from mechinterp.config import ExperimentConfig
from mechinterp.display import Result, frame_of, head_axes, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.evaluation import evaluation_prompts, stream_width
from mechinterp.models.run.predictor import Predictor, Source, predictor_of
from mechinterp.models.weights import Weights
from mechinterp.progress import progress
from mechinterp.training.general.trainer import DeepRun

MODELS = ("pruned", "full")
ROWS = 5
"""Number of measurements during further training, the first and the last step included."""
DATA_SEED = 1000
"""Seed of the prompts of further training; the first training uses another seed."""
SAVED_WITHIN = 1e-5
"""Largest difference between the saved and the masked model, relative to the largest prediction."""


def masked_by(kept: Bool[np.ndarray, "layer head"]) -> list[Head]:
    """Heads that are not kept.

    Example:
        >>> masked_by(np.array([[True, False], [True, True]]))
        [(0, 1)]
    """
    return [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]


def checked(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of kept heads, checked.

    Raises:
        ValueError: If it is not a boolean array of this shape, or keeps no head.
    """
    if kept.shape != shape or kept.dtype != bool:
        raise ValueError(
            f"A rule must return a boolean array of shape {shape}, got {kept.dtype} of shape {kept.shape}."
        )
    if not kept.any():
        raise ValueError(f"A rule must keep at least one of {kept.size} heads, got none.")
    return kept


def pruned_weights(weights: Weights, kept: Bool[np.ndarray, "layer head"]) -> Weights:
    """Weights without the dropped heads, with as many heads per layer as the largest layer needs.

    Raises:
        ValueError: If `kept` does not have the model's shape, or keeps no head.
    """
    kept = checked(kept, (weights.n_layers, weights.n_heads))
    return weights.without(masked_by(kept)).compact()


@dataclass(frozen=True, eq=False, repr=False)
class FineTuning(Result):
    """Excess risk of the pruned and of the full model while both are trained further on the same prompts."""

    step: Int[np.ndarray, " row"]
    """Number of updates since pruning."""
    risk: Float[np.ndarray, "model row"]
    """Excess risk, unit y^2; one row for each of `MODELS`."""
    risk_sem: Float[np.ndarray, "model row"]
    ratio: Float[np.ndarray, "model row"]
    """Risk divided by the risk of the full model before further training."""
    ratio_sem: Float[np.ndarray, "model row"]
    """Standard error of `ratio`, paired over prompts."""
    weights: Weights
    """Weights of the pruned model after the last step."""

    def __repr__(self) -> str:
        ends = zip(self.ratio[:, -1], self.ratio_sem[:, -1], strict=True)
        pruned, full = (with_error(*pair) for pair in ends)
        return (
            f"FineTuning({self.step[-1]} steps: {self.ratio[0, 0]:.3g} to {pruned} times the full model's risk; "
            f"full model {full})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per model and step."""
        return frame_of(self, *with_sem("risk", "ratio"), model=MODELS, step=self.step)

    def plot(self) -> go.Figure:
        """The ratio over steps."""
        return figures.lines(
            self.step,
            figures.named(MODELS, self.ratio, self.ratio_sem),
            title="Excess risk during further training, relative to the full model",
            x_title="steps since pruning",
            y_title="ratio",
        )


@torch.inference_mode(False)
def fine_tune(
    checkpoint: Checkpoint,
    kept: Bool[np.ndarray, "layer head"],
    prompts: Prompts,
    *,
    steps: int = 400,
) -> FineTuning:
    """Train a pruned model further as in its training: context lengths, clipping, and the decay of
    the step size.

    Pruned heads stay zero and get no gradient. The full model is trained the same way as a control.

    Args:
        kept: Mask of kept heads, as in `Pruning`.
        prompts: Prompts to measure risks on; they must not have selected the heads.
    Raises:
        ValueError: If no head is kept, or steps are out of range.
    Source:
        A choice made here; the full model is trained as long, as a control.
    See also:
        `prune`.
    Example:
        >>> from mechinterp import load, prune, sample_prompts
        >>> checkpoint = load("checkpoints/sparse-h4-noise0.1-s0")
        >>> prompts = sample_prompts(checkpoint, 400)
        >>> found = fine_tune(checkpoint, prune(checkpoint.model, prompts[:200]).kept, prompts[200:], steps=5)
        >>> bool(found.risk[0, -1] < found.risk[0, 0])
        True
    """
    checkpoint = checkpoint_of(checkpoint, "fine_tune")
    train, every = checkpoint.config.train, max(1, steps // (ROWS - 1))
    train = replace(
        train,
        steps=steps,
        data_seed=DATA_SEED,
        log_every=every,
        snapshot_every=every,
        n_eval_prompts=1,
    )
    config = replace(checkpoint.config, train=train)
    starts = (pruned_weights(checkpoint.weights, kept), checkpoint.weights)
    trained = [_trained(config, start) for start in starts]
    errors = np.array(
        [[masked_errors(w, prompts, [[]])[:, 0] for w in run.values()] for run in trained]
    )
    before = errors[1, 0]  # the full model before further training
    by_prompt = np.moveaxis(errors, -1, 0)
    steps_made, weights = zip(*trained[0].items(), strict=True)
    return FineTuning(
        step=np.array(steps_made),
        weights=weights[-1],
        **estimates(risk=mean_and_sem(by_prompt), ratio=ratio_and_sem(by_prompt, before)),
    )


def _trained(config: ExperimentConfig, start: Weights) -> dict[int, Weights]:
    """Weights by step."""
    run = DeepRun({"": replace(config, model=start.model)}, start=start)
    for _ in progress(range(-(-config.train.steps // config.train.log_every)), "training on"):
        run.advance()
    (trained,) = run.results().values()
    return trained.snapshots | {trained.step: trained.weights}


def save_pruned(
    checkpoint: Checkpoint,
    kept: Bool[np.ndarray, "layer head"],
    path: str | Path,
    *,
    prompts: Prompts,
    tuned: FineTuning | None = None,
) -> Checkpoint:
    """Save the pruned model as a checkpoint, and check that it predicts as the masked or the trained model.

    Its heads are renumbered in the order of `kept_heads` in its origin.

    Args:
        kept: Mask of kept heads, as in `Pruning`.
        prompts: Prompts on which both predictions are compared.
        tuned: Further training, whose last weights are saved; None: those of the checkpoint.
    Raises:
        CheckpointError: If the folder is not empty or cannot be written.
        ValueError: If no head is kept, or the saved model predicts otherwise.
    """
    checkpoint = checkpoint_of(checkpoint, "save_pruned")
    if tuned is None:
        weights, steps = pruned_weights(checkpoint.weights, kept), 0
        expected = checkpoint.predictor.run(prompts, [masked_by(kept)])[0]
    else:
        weights, steps = tuned.weights, int(tuned.step[-1])
        expected = predictor_of(weights).run(prompts)[0]
    heads = [[int(head) for head in np.flatnonzero(layer)] for layer in kept]
    origin = {"pruned_from": checkpoint.name, "kept_heads": heads}
    save(
        path,
        replace(checkpoint.config, model=weights.model),
        weights,
        step=checkpoint.step + steps,
        assumed=checkpoint.assumed,
        origin=origin | ({"fine_tuned_steps": steps} if steps else {}),
    )
    saved = load(path, anyway=True)  # its predictions are checked below
    size = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    error = ((saved.predictor.run(prompts)[0] - expected).abs().max() / size).item()
    if not error <= SAVED_WITHIN:
        model = "masked model" if tuned is None else "trained model"
        raise ValueError(
            f"{path}: the saved model must predict as the {model} to {SAVED_WITHIN}, got a difference of {error:.2g}."
        )
    return saved


WIDE = 100
"""Ratio of the largest to the smallest risk above which the bars use a logarithmic axis."""
SPLITS = 8
"""Number of random halvings of the prompts. More halvings average over more choices and cost more
runs."""
FULL_RISKS = with_sem("full_risk", "full_refit_risk")
COSTS = with_sem("risk", "ratio", "refit_risk", "refit_ratio")
Rule = Callable[[np.ndarray], np.ndarray]
"""Function from the rises [layer, head] of the excess risk to a mask [layer, head], True for heads
that are kept."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The distinct sets of heads that a rule chose on halves of the prompts, with their shares."""

    kept: Bool[np.ndarray, "set layer head"]
    share: Float[np.ndarray, " set"]
    """Share of all choices that chose this set."""
    weight: Float[np.ndarray, "set prompt"]
    """Among the choices that did not use this prompt, the share that chose this set; sums to 1 over
    the sets."""

    def ratio(
        self,
        errors: Float[np.ndarray, "set prompt"],
        full: Float[np.ndarray, " prompt"],
        fit_sem: Float[np.ndarray, " set"] | float = 0.0,
    ) -> tuple[float, float]:
        """Ratio of the cross-fitted risk to another risk on the same prompts, with its standard
        error over prompts, choices and fits; next to errors of 1 the risk itself.

        Args:
            fit_sem: Standard error of each set's mean due to a fitted read-out.
        """
        ratio, sem = ratio_and_sem(self.crossed(errors), full)
        values = ratio_and_sem(errors.T, full)[0]
        # The mean over many halves of the same prompts varies from sample to sample by the covariance C
        # of the values of two halves. The spread over the halves is V = variance of one value - C. Two
        # halves share half of their prompts, so the two rises that decide them have correlation 1/2.
        # Between two equal heads the choice is the sign of a normal variable. With a difference D of the
        # risks the variance is D^2 / 4 and, by Sheppard's formula,
        # C = D^2 / 4 * (2 / pi) asin(1/2) = D^2 / 12, hence V = D^2 / 6 = 2 C. If one head is better, V
        # exceeds 2 C (2.6 C if its lead on a half is one standard error, 5.3 C at two), so that V / 2 is
        # conservative. V is then small, and 0 for a clear choice.
        between = self.share @ np.square(values - self.share @ values) / 2
        # All fits see the same noise, so their errors add up.
        fit = (self.share * fit_sem).sum() / full.mean()
        return float(ratio), float(np.sqrt(sem**2 + between + fit**2))

    def crossed(self, errors: Float[np.ndarray, "set prompt"]) -> Float[np.ndarray, " prompt"]:
        """Error of each prompt, averaged over the choices that did not use it."""
        return (self.weight * errors).sum(0)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Pruning(Result):
    """Cost of a rule that masks heads for good, without retraining."""

    kept: Bool[np.ndarray, "layer head"]
    """Heads chosen on all prompts. The risks are of heads that are chosen anew on each half of the
    prompts."""
    rise: Float[np.ndarray, "layer head"]
    """Rise of the excess risk when a head is masked, on all prompts, unit y^2; the rule reads it.
    """
    choices: Choices
    """Sets of heads that the rule chose on halves of the prompts."""
    errors: Float[np.ndarray, "set prompt"]
    """Squared error with each of these sets kept, unit y^2."""
    refit_errors: Float[np.ndarray, "set prompt"]
    """The same with a new read-out."""
    fit_errors: Float[np.ndarray, " set"]
    """Standard error of the mean of `refit_errors` due to the fit of the read-out."""
    risk: float
    """Excess risk of the pruned model, on prompts that were not used to choose its heads."""
    risk_sem: float
    """Standard error over prompts and choices of heads; with a new read-out also over its fit."""
    ratio: float
    """`risk` divided by that of the full model."""
    ratio_sem: float
    refit_risk: float
    """Excess risk of the pruned model with a new read-out: a cross-validated ridge regression on
    the stream at the query."""
    refit_risk_sem: float
    refit_ratio: float
    """Risk with a new read-out divided by the risk of the unchanged full model."""
    refit_ratio_sem: float
    carried_by_few: bool
    """True if 1% of the prompts make up more than half of `risk`; the risk with a new read-out is
    then more informative."""
    full_risk: float
    """Excess risk of the full model."""
    full_risk_sem: float
    full_refit_risk: float
    """Excess risk of the full model with a new read-out."""
    full_refit_risk_sem: float
    tuned: FineTuning | None = None
    """Further training of the pruned model; None: there was none."""
    saved: str | None = None
    """Folder of the pruned model; None if it was not saved."""

    @property
    def chosen(self) -> Float[np.ndarray, "layer head"]:
        """Share of the choices on halves of the prompts that keep a head."""
        return np.tensordot(self.choices.share, self.choices.kept, axes=1)

    def __repr__(self) -> str:
        times = with_error(self.ratio, self.ratio_sem)
        as_is = f"excess risk {digits(self.full_risk)} to {digits(self.risk)}, {times} times"
        refit = f"{digits(self.refit_risk)} with a new read-out"
        if self.carried_by_few:
            as_is, refit = refit, f"{as_is}, dominated by few prompts"
        heads = ", ".join(map(str, self.kept.sum(1)))
        return f"Pruning({heads} heads kept: {as_is}; {refit})"

    def sentences(self) -> list[str]:
        """Number of heads kept, and whether few prompts dominate the risk."""
        heads = ", ".join(map(str, self.kept.sum(1)))
        layers, n_heads = len(self.kept) - 1, self.kept.shape[1]
        few = "1% of the prompts make up most of this risk: read the number with a new read-out."
        return [
            f"heads kept in layers 0 to {layers}: {heads} of {n_heads} per layer.",
            *([few] if self.carried_by_few else []),
            *([f"{self.tuned!r}."] if self.tuned else []),
            *([f"Pruned model: {self.saved}"] if self.saved else []),
        ]

    def to_document(self) -> dict:
        """Risks and heads."""
        return {
            **{name: getattr(self, name) for name in (*FULL_RISKS, *COSTS, "carried_by_few")},
            "heads_per_layer": self.kept.sum(1),
            "heads": records(self.to_frame()),
            "fine_tuning": None if self.tuned is None else records(self.tuned.to_frame()),
            "checkpoint": self.saved,
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        return frame_of(self, "kept", "chosen", "rise", **head_axes(self.kept))

    def cost_frame(self) -> pd.DataFrame:
        """Risks of the full and of the pruned model, without and with a new read-out."""
        full = {name.removeprefix("full_"): getattr(self, name) for name in FULL_RISKS}
        pruned = {name: getattr(self, name) for name in COSTS}
        return pd.DataFrame([{"model": "full", **full}, {"model": "pruned", **pruned}])

    def tables(self) -> dict[str, Table]:
        """Risks, and how often each head is chosen."""
        return {
            "pruning": Table(self.cost_frame(), "Excess risk"),
            "chosen": Table(self.to_frame(), "Heads kept, and share of the choices that keep each"),
        }

    def figures(self) -> dict[str, go.Figure]:
        """Risks, and how often each head is chosen."""
        tuned = {"fine_tuning": self.tuned.plot()} if self.tuned else {}
        return {"pruning": self.plot(), "chosen": self.plot_chosen(), **tuned}

    def plot(self) -> go.Figure:
        """Excess risk of the full and the pruned model, without and with a new read-out."""
        frame = self.cost_frame()
        groups = {"as it is": with_sem("risk"), "with a new read-out": with_sem("refit_risk")}
        bars = {how: tuple(frame[[*names]].to_numpy().T) for how, names in groups.items()}
        title = "Excess risk of the full and the pruned model"
        figure = figures.bars([*frame["model"]], bars, title=title, y_title="excess risk (y²)")
        risks = frame[["risk", "refit_risk"]].to_numpy()
        wide = risks.min() > 0 and risks.max() > WIDE * risks.min()
        return figure.update_yaxes(type="log") if wide else figure

    def plot_chosen(self) -> go.Figure:
        """Share of the choices that keep each head."""
        title = "Share of the halves of the prompts that keep a head"
        return heatmaps.heatmap(self.chosen, title=title, unit="share", signed=False)


def refit_errors(
    source: Source, prompts: Prompts, gone: Sequence[Head]
) -> tuple[Float[np.ndarray, " prompt"], float]:
    """Squared error with heads masked and a new read-out, and the standard error of its mean due to
    the fit.

    The read-out is a cross-validated ridge regression on the stream at the query.

    Raises:
        ValueError: If there are too few prompts for the features.
    """
    stream = predictor_of(source).streams(prompts, heads=gone)[-1, :, 0]
    exact = (each.double().numpy(force=True) for each in (stream, prompts.y_query))
    (fitted,) = cross_validated(*exact)
    clean = prompts.y_query_clean.double().numpy(force=True)
    return np.square(fitted.prediction - clean).mean(1), fitted.fit_sem(clean)


def best_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Keeps all heads of the first layer, and the head with the largest rise of each later layer.

    Example:
        >>> best_head_later(np.array([[1.0, 2.0], [1.0, 2.0], [0.0, -1.0]])).tolist()
        [[True, True], [False, True], [True, False]]
    """
    kept = rise.argmax(1)[:, None] == np.arange(rise.shape[1])
    kept[0] = True
    return kept


def least_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Control: keeps all heads of the first layer, and the head with the smallest rise of each
    later layer."""
    return best_head_later(-rise)


def best_head_first(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Control: keeps the head with the largest rise of the first layer, and all heads of the later
    layers."""
    kept = rise.argmax(1)[:, None] == np.arange(rise.shape[1])
    kept[1:] = True
    return kept


RULES: dict[str, Rule] = {
    "best-later": best_head_later,
    "least-later": least_head_later,
    "best-first": best_head_first,
}


def _rule_of(named: str, n_layers: int) -> Rule:
    """The rule of this name, for a model with this number of layers."""
    if named not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {named!r}.")
    if n_layers == 1:
        raise ValueError(
            "prune needs a model of several layers, got one; use ablate to mask its heads."
        )
    return RULES[named]


def prune(
    source: Source,
    prompts: Prompts | None = None,
    *,
    rule: Rule | str = "best-later",
    fine_tune_steps: int | None = None,
    out: str | Path | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> Pruning:
    """Excess risk of a model without the heads that a rule drops, as it is and with a new read-out.

    Heads are scored by zero ablation. `kept` is chosen on all prompts, so measure it on others. The
    risks are cross-fitted: the prompts are halved at random 8 times, heads are chosen on each half,
    and the error of a prompt is its mean over the choices that did not use it. The standard error is

    sqrt(SEM^2 + V / 2 + F^2),

    with SEM that of the mean of these errors over prompts (paired, by the delta method, for
    ratios), V the variance of the risk (or ratio) over the 16 choices, and F the error of the fit of
    a new read-out. V is 0 if the choice is clear. V is halved, not divided by the number of halves,
    because halves of the same prompts overlap: V / 2 is the variance of the mean over choices
    between two equally good heads. A new read-out separates lost information from information that
    is only stored differently.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        rule: "best-later" keeps all heads of the first layer and the head with the largest rise of
            each later layer. Controls are "least-later", the head with the smallest rise of each later
            layer, and "best-first", the best head of the first layer and all later heads. Or a function
            from the rises to the kept heads.
        fine_tune_steps: Number of steps of further training, measured on prompts of the next seed; None: none.
        out: New folder for the pruned model, with the heads chosen on all prompts, after further
            training if there is any; None: it is not saved.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
    Raises:
        ValueError: If the rule is unknown, keeps no head or its mask has another shape, there are too
            few prompts, or the folder is not empty. Also if a model that is to be trained or saved is
            no checkpoint.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who keep all heads of the first layer and
        the best head of each later layer. The scores and the read-out are choices made here.
    See also:
        `ablate_heads`, `fine_tune`.
    Example:
        >>> from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
        >>> prune(preprocess_then_optimise_model([0.5], d_x=4), n_prompts=64).ratio
        1.0
    """
    if out is not None:
        require_new(Path(out))
    predictor = predictor_of(source)
    chosen = _rule_of(rule, predictor.n_layers) if isinstance(rule, str) else rule
    prompts = evaluation_prompts(
        source, prompts, n_prompts=n_prompts, seed=seed, fitted=stream_width(source)
    )
    shape, heads = (predictor.n_layers, predictor.n_heads), [[head] for head in predictor.heads]
    single = masked_errors(predictor, prompts, [[], *heads])

    def rise_on(scored: np.ndarray | slice) -> Float[np.ndarray, "layer head"]:
        risks = single[scored].mean(0)
        return (risks[1:] - risks[0]).reshape(shape)

    rise, halves = rise_on(slice(None)), random_halves(len(prompts), SPLITS)
    kept = checked(chosen(rise), shape)
    on_halves = [checked(chosen(rise_on(half)), shape) for half in halves]
    choices = choices_of(np.array(on_halves), halves)
    costs = _costs(predictor, prompts, single[:, 0], choices)
    tuned = None
    if fine_tune_steps is not None:
        checkpoint = checkpoint_of(source, "fine_tune_steps")
        if checkpoint.format != "native":
            raise ValueError(
                "fine_tune_steps needs a model that this package trained, got one of format "
                f"{checkpoint.format}."
            )
        others = evaluation_prompts(source, n_prompts=n_prompts, seed=seed + 1)
        tuned = fine_tune(checkpoint, kept, others, steps=fine_tune_steps)
    if out is not None:
        checkpoint = checkpoint_of(source, "out")
        save_pruned(checkpoint, kept, out, prompts=prompts, tuned=tuned)
    found = Pruning(kept=kept, rise=rise, choices=choices, tuned=tuned, **costs)
    return found if out is None else replace(found, saved=str(out))


def choices_of(
    kept: Bool[np.ndarray, "half layer head"], halves: Bool[np.ndarray, "half prompt"]
) -> Choices:
    """The distinct sets among the heads that are kept on each half of the prompts."""
    different, which = np.unique(kept, axis=0, return_inverse=True)
    one_of = np.arange(len(different))[:, None] == which.ravel()
    without = (~halves).sum(0)  # choices that did not use a prompt
    return Choices(different, one_of.mean(1), one_of.astype(float) @ ~halves / without)


def _costs(
    predictor: Predictor, prompts: Prompts, full: Float[np.ndarray, " prompt"], choices: Choices
) -> dict[str, Any]:
    """Errors and risks of the model with each chosen set of heads, by field of `Pruning`."""
    masks = [masked_by(each) for each in choices.kept]
    errors = masked_errors(predictor, prompts, masks).T
    refits = [
        refit_errors(predictor, prompts, gone) for gone in progress([[], *masks], "new read-outs")
    ]
    (full_refitted, *refitted), (full_fit, *fits) = (
        list(each) for each in zip(*refits, strict=True)
    )
    refit, fit_sem, ones = np.array(refitted), np.array(fits), np.ones(len(prompts))
    full_refit_risk, sem = mean_and_sem(full_refitted)
    return {
        "errors": errors,
        "refit_errors": refit,
        "fit_errors": fit_sem,
        "carried_by_few": bool(carried_by_few(choices.crossed(errors))),
        **estimates(
            risk=choices.ratio(errors, ones),
            ratio=choices.ratio(errors, full),
            refit_risk=choices.ratio(refit, ones, fit_sem),
            refit_ratio=choices.ratio(refit, full, fit_sem),
            full_risk=mean_and_sem(full),
            full_refit_risk=(full_refit_risk, np.hypot(sem, full_fit)),
        ),
    }
