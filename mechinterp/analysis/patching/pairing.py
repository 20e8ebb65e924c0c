"""Pairs of prompts for patching, which differ in the task vector only, and what the nodes of a model make of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.analysis.ablation.measured import Metric
from mechinterp.analysis.patching.graph import Node, graph_of, layer_of, nodes_of
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.hooked.masks import written
from mechinterp.models.hooked.runner import HookedPredictor, read_prediction
from mechinterp.models.layers import tokens_of
from mechinterp.models.run.evaluation import (
    distinct_pairs,
    evaluation_prompts,
    law_in_force,
    require_prompts,
)
from mechinterp.models.run.n_prompts import LEAST, require_number
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights

SUM_ERROR = 1e-3
"""Largest difference between the last stream and the sum of what is written to it, relative to its largest entry. A
larger difference means that the stream is no sum."""
OutputMetric = Callable[[Tensor], Float[Tensor, " batch"]]
"""Function from a model's output to one number per prompt."""


def clean_and_corrupted(
    source: Source | TaskConfig,
    clean: Prompts | None,
    corrupted: Prompts | None,
    *,
    analysis: str = "patching",
    name: str = "prompts",
    task: TaskLike | None = None,
    n_prompts: int,
    seed: int,
) -> tuple[Prompts, Prompts]:
    """Clean prompts, and corrupted prompts: by default with other task vectors and the same covariates and noise.

    Given prompts without task vectors are corrupted by another order of the y of their pairs.

    Args:
        clean: Clean prompts; None draws `n_prompts` with `seed`.
        corrupted: Corrupted prompts. None gives the clean prompts other task vectors: given prompts get the task vector
            of the prompt before, drawn prompts get new ones, drawn with `seed` + 1. Given prompts without task vectors
            get the y of their pairs in another order, drawn with `seed`.
        analysis, name: Name of the analysis and of its argument for clean prompts, for messages.
        task: Law of drawn prompts; None means the model's own.
    Raises:
        ValueError: If `clean` or `corrupted` is something else, prompts must be drawn for a model without a task, or the
            model's run on all of them does not fit into memory (before they are drawn).
    """
    require_prompts(clean, analysis, name=name)
    require_prompts(corrupted, analysis, name="corrupted")
    law = None if task is None else law_in_force(source, task, analysis, clean)
    if clean is not None and corrupted is not None and len(clean) == len(corrupted):
        clean, corrupted = distinct_pairs(clean, corrupted)
        require_number(len(clean), what="distinct pairs of prompts")
        return clean, corrupted
    drawn = clean is None
    if drawn and n_prompts > LEAST and not isinstance(source, TaskConfig):
        few = evaluation_prompts(source, law=law, n_prompts=LEAST, seed=seed)
        predictor_of(source).require_room(n_prompts, few)
    clean = evaluation_prompts(source, clean, law=law, n_prompts=n_prompts, seed=seed)
    if corrupted is None and clean.beta is None:
        corrupted = with_permuted_y(clean, seed=seed)
    elif corrupted is None:
        own = clean.task_vectors(f"{analysis} without corrupted prompts")
        other = own.roll(1, 0)
        if drawn:
            again = evaluation_prompts(source, law=law, n_prompts=len(clean), seed=seed + 1)
            other = again.task_vectors(analysis).to(own)
        corrupted = with_task_vectors(clean, other)
    return clean, corrupted


def with_permuted_y(prompts: Prompts, *, seed: int = 0) -> Prompts:
    """The prompts with the y of the pairs of each prompt in another order, so that they say nothing about the query.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> prompts = evaluation_prompts(TaskConfig(d_x=2), n_prompts=8)
        >>> other = with_permuted_y(prompts)
        >>> bool((other.y == prompts.y).all()), bool((other.y.sort(1).values == prompts.y.sort(1).values).all())
        (False, True)
    """
    shape = prompts.y.shape[:2]
    order = torch.rand(shape, generator=generator_for(seed, "eval", 1), device="cpu").argsort(1)
    order = order.to(prompts.y.device)[..., None].expand_as(prompts.y)
    return replace(prompts, y=prompts.y.gather(1, order))


def with_task_vectors(prompts: Prompts, beta: Float[Tensor, "batch d_x d_y"]) -> Prompts:
    """The prompts with other task vectors, and the same covariates and noise.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> prompts = evaluation_prompts(TaskConfig(d_x=2, noise_var=0.0), n_prompts=8)
        >>> other = with_task_vectors(prompts, 2 * prompts.beta)
        >>> bool((other.y - 2 * prompts.y).abs().max() < 1e-12)
        True
    """
    moved = beta - prompts.task_vectors("with_task_vectors")
    at_query = (prompts.x_query[:, None] @ moved)[:, 0]
    return replace(
        prompts,
        y=prompts.y + prompts.x @ moved,
        y_query=prompts.y_query + at_query,
        y_query_clean=prompts.y_query_clean + at_query,
        beta=beta,
    )


def shares_of(ig_steps: int) -> list[float]:
    """Points between the corrupted (0) and the clean prompts (1) at which gradients are taken."""
    return [0.0] if ig_steps == 1 else [(k + 0.5) / ig_steps for k in range(ig_steps)]


def put(own: Tensor, hook: object, *, at: tuple[int | slice, ...], values: Tensor) -> Tensor:
    """Hook that replaces its activation at one place of every prompt."""
    own = own.clone()
    own[:, *at] = values[:, *at]
    return own


def output_metric(
    read: Callable[[Tensor], Tensor], metric: Metric | None, clean: Prompts, output: Tensor
) -> OutputMetric:
    """Metric of a model's output.

    Args:
        read: Function from the output to the prediction.
        metric: None means minus the squared distance of the prediction to that on the clean prompts, unit y^2.
        output: The model's output on the clean prompts.
    Raises:
        ValueError: If the metric does not give one number per prompt.
    """
    target = read_prediction(read, output, clean)
    if metric is None:
        return lambda output: -(read(output) - target).square().sum(-1)
    values = metric(target, clean)
    if not isinstance(values, Tensor) or values.shape != (len(clean),):
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"metric must give one number per prompt, [{len(clean)}], got {got}.")
    return lambda output: metric(read(output), clean)


def inputs_of(
    embed: Callable[[Prompts], Tensor], clean: Prompts, corrupted: Prompts
) -> tuple[Tensor, Tensor]:
    """Inputs of the model for both kinds of prompts.

    Args:
        embed: Function from prompts to inputs.
    Raises:
        ValueError: If they differ in shape, or there are fewer than two prompts.
    """
    inputs = embed(clean), embed(corrupted)
    shapes = [list(each.shape) for each in inputs]
    if shapes[0] != shapes[1] or shapes[0][0] < 2:
        raise ValueError(
            f"clean and corrupted tokens must have the same shape, with at least 2 prompts, got {shapes[0]} and {shapes[1]}."
        )
    return inputs


@dataclass(frozen=True, eq=False, kw_only=True)
class GraphPair:
    """Clean and corrupted inputs of a model, its graph, and a metric of its outputs."""

    clean: Tensor
    corrupted: Tensor
    senders: Sequence[Node]
    receivers: Sequence[Node]
    metric: OutputMetric
    outputs: tuple[Tensor, Tensor]
    """Outputs on the clean and on the corrupted prompts."""

    @torch.no_grad()
    def gained(self) -> Float[np.ndarray, " batch"]:
        """Metric on the clean prompts minus metric on the corrupted prompts."""
        clean, corrupted = map(self.metric, self.outputs)
        return (clean - corrupted).double().numpy(force=True)

    @property
    def edges(self) -> Bool[np.ndarray, "sender receiver"]:
        """True where a sender comes before a receiver."""
        times = [np.array([node.time for node in each]) for each in (self.senders, self.receivers)]
        return times[0][:, None] < times[1]


@torch.no_grad()
def pair_of_weights(
    weights: Weights, clean: Prompts, corrupted: Prompts, *, metric: Metric | None, nodes: str
) -> GraphPair:
    """Pair of prompts for a model without hooks and, for nodes="all", without MLPs.

    Raises:
        ValueError: If the inputs differ in shape, or there are fewer than two prompts.
    """

    def tokens(prompts: Prompts) -> Tensor:
        own = prompts.to(weights.device).to(weights.dtype)
        return tokens_of(own, weights.model, d_x=weights.d_x, d_y=weights.d_y)

    def read(output: Tensor) -> Tensor:
        return output[:, -1]

    inputs = inputs_of(tokens, clean, corrupted)
    predictor = predictor_of(weights)
    predictions = [predictor.predict(each)[:, None] for each in (clean, corrupted)]
    outputs = tuple(each.to(weights.device) for each in predictions)
    senders, receivers = nodes_of(
        weights.n_layers, weights.n_heads, nodes, "the last stream", False
    )
    return GraphPair(
        clean=inputs[0],
        corrupted=inputs[1],
        senders=senders,
        receivers=receivers,
        metric=output_metric(read, metric, clean, outputs[0]),
        outputs=(outputs[0], outputs[1]),
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class InputPair(GraphPair):
    """Pair of prompts for a hooked model, and how the outputs of its senders differ."""

    hooked: HookedPredictor
    moved: Float[Tensor, "batch pos sender d_model"]
    """Output of each sender on the clean prompts minus that on the corrupted prompts."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        hooked: HookedPredictor,
        clean: Prompts,
        corrupted: Prompts,
        *,
        metric: Metric | None = None,
        nodes: str = "heads",
    ) -> "InputPair":
        """Pair of prompts for a model.

        Raises:
            ValueError: If the model has no such graph, the inputs differ in shape, there are fewer than two prompts, or
                with nodes="all" the last stream is not the sum of what the senders write.
        """
        senders, receivers = graph_of(hooked, nodes)
        inputs = inputs_of(hooked.inputs, clean, corrupted)
        last, hooks = hooked.stream_name(hooked.n_layers), hooks_of(senders)
        names = [*hooks, *([last] if nodes == "all" else [])]
        runs = [hooked.run_noting(each, names) for each in inputs]
        change = {name: runs[0][1][name] - runs[1][1][name] for name in names}
        moved = torch.cat([written_at(hooked.model, name, change[name]) for name in hooks], 2)
        if nodes == "all":
            _require_sum(moved.sum(2), change[last], type(hooked.model).__name__)
        return cls(
            hooked=hooked,
            clean=inputs[0],
            corrupted=inputs[1],
            senders=senders,
            receivers=receivers,
            moved=moved,
            metric=output_metric(hooked.read, metric, clean, runs[0][0]),
            outputs=(runs[0][0], runs[1][0]),
        )


def hooks_of(senders: Sequence[Node]) -> list[str]:
    """Hooks of the senders, each once, in their order."""
    return list(dict.fromkeys(node.hook for node in senders))


def written_at(
    model: Any, hook: str, values: Float[Tensor, "batch pos *axes"]
) -> Float[Tensor, "batch pos sender d_model"]:
    """Outputs of the senders at one hook, as added to the stream, without a layer's bias."""
    return written(model, layer_of(hook), values) if values.ndim == 4 else values[:, :, None]


def _require_sum(total: Tensor, stream: Tensor, kind: str) -> None:
    # Not >, so that NaN counts as different.
    if not (total - stream).abs().max() <= SUM_ERROR * stream.abs().max():
        raise ValueError(
            "model must have a last stream that is the sum of its input and of what its heads and MLPs write, got a "
            f"{kind} with other parts."
        )
