"""Effects of heads through later heads: attribution patching of edges, checked by patching each
edge.

An edge goes from the output of a head to the query, key or value input of a head in a later layer.
Its effect is the change of a metric when this input alone gets the clean output, and everything
else gets the corrupted one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.patching.pairing import Metric, Pair, clean_and_corrupted
from mechinterp.analysis.stats import estimates, mean_and_sem, rank_correlation, resampled
from mechinterp.display import Result, frame_of, head_axes, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.hooks import Hooks
from mechinterp.models.hooked.masks import resid_name
from mechinterp.models.hooked.module import ModuleHooks
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.hooked.written import require_sum
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress

COMPONENTS = ("q", "k", "v")
LISTED = 12
N_PAIRS = 32
"""Default number of pairs of prompts; every edge needs one run on them."""
ROWS = 256
"""Number of prompts that run side by side, several edges of one layer together."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadEdges(Result):
    """Effects of edges: change of the prediction that one head causes through another."""

    ig_steps: int
    """Number of points between the corrupted and the clean prompts at which gradients are taken."""
    estimate: Float[np.ndarray, "input layer head later_layer later_head"]
    """First-order effect of each edge, mean over prompts, in units of the metric; inputs are q, k,
    v. NaN if the second head is not in a later layer."""
    estimate_sem: Float[np.ndarray, "input layer head later_layer later_head"]
    """Standard error of `estimate` over prompts."""
    patched: Float[np.ndarray, "input layer head later_layer later_head"]
    """Effect of each edge when it is patched, mean over prompts, in units of the metric."""
    patched_sem: Float[np.ndarray, "input layer head later_layer later_head"]
    """Standard error of `patched` over prompts."""
    rank_correlation: float
    """Spearman correlation of `estimate` and `patched` over the edges; NaN if no edge has an
    effect."""
    rank_correlation_sem: float
    """Bootstrap standard error of `rank_correlation` over prompts."""
    total: float
    """Metric on the clean prompts minus metric on the corrupted prompts."""
    total_sem: float

    def __repr__(self) -> str:
        top: Any = next(self.to_frame().itertuples())
        return (
            f"HeadEdges({edge_name(top)} {top.patched:+.3g} ± {top.patched_sem:.2g} of {self.total:+.3g}; rank correlation of "
            f"estimates (ig_steps={self.ig_steps}) and patches {self.rank_correlation:.3f} ± {self.rank_correlation_sem:.2g})"
        )

    def sentences(self) -> list[str]:
        """The largest effects, and the agreement of gradients with patching."""
        frame = self.to_frame()
        named = ", ".join(
            f"{edge_name(e)} ({with_error(e.patched, e.patched_sem)})"
            for e in frame.head(3).itertuples()
        )
        return [
            f"Other task vectors move the prediction by {with_error(self.total, self.total_sem)} y² (mean squared "
            f"distance). Largest effects of edges, each patched alone: {named}.",
            f"Rank correlation of gradient estimates and patching over {len(frame)} edges: "
            f"{with_error(self.rank_correlation, self.rank_correlation_sem)}.",
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per edge, the largest effect first."""
        heads, later = head_axes(self.patched[0]), head_axes(self.patched[0, 0, 0])
        axes = {"input": COMPONENTS, **heads, **{f"later_{name}": at for name, at in later.items()}}
        frame = frame_of(self, *with_sem("estimate", "patched"), **axes).dropna(subset=["patched"])
        return frame.sort_values("patched", key=np.abs, ascending=False, ignore_index=True)

    def plot(self) -> go.Figure:
        """Edges with the largest effects, estimated and patched."""
        top = self.to_frame().head(LISTED)
        return figures.bars(
            [edge_name(row) for row in top.itertuples()],
            {
                name: (top[column].to_numpy(), top[f"{column}_sem"].to_numpy())
                for name, column in (("estimated", "estimate"), ("patched", "patched"))
            },
            title="Effect of edges between heads",
            y_title="change of the metric",
        )


@torch.inference_mode(False)
def attribute_edges(
    source: Source,
    clean: Prompts | None = None,
    corrupted: Prompts | None = None,
    *,
    ig_steps: int = 1,
    metric: Metric | None = None,
    n_prompts: int = N_PAIRS,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> HeadEdges:
    r"""Effects of all edges between heads, estimated by gradients and measured by patching one edge
    at a time.

    estimate(u -> v) = sum over positions of (w_u(clean) - w_u(corrupted)) . mean_k dm/dr_v(x_k),
    x_k = corrupted + (k - 1/2) / K (clean - corrupted), k = 1..K = ig_steps; for K = 1, x_1 = corrupted

    with w_u the output z_u W_O of head u, r_v the stream at the query, key or value input of head v
    (before any norm), and m the metric.

    Args:
        clean: Clean prompts; None draws `n_prompts` of the model's own task with `seed`.
        corrupted: Corrupted prompts; None means the clean ones with other task vectors, drawn with
            `seed` + 1. The covariates are then the same on both, so that edges that depend on
            covariates alone have no effect.
        ig_steps: 1 for attribution patching (EAP). More for integrated gradients (EAP-IG), which
            average the gradient between corrupted and clean prompts. The effect of a single patch
            is closer to EAP: a patch is a small step from the corrupted prompts.
        metric: Function from the model's output to one number per prompt; None means minus the
            squared distance between the prediction and that on the clean prompts, unit y^2.
        progress: Optional progress callback.
    Raises:
        ValueError: If ig_steps is below 1, there are fewer than two prompts, the model has one
            layer, its stream is not the sum of outputs (a norm after each layer, layers that are
            not the stream), queries, keys and values of a plain module cannot be followed, or the
            prompts differ in shape.
    Source:
        Edges and patches are those of transformer_lens 4.3; a test compares both (Syed et al. 2023,
        arXiv 2310.10348; Wang
        et al. 2022, arXiv 2211.00593). Integrated gradients follow Hanna et al. 2024, arXiv
        2403.17806, with (k - 1/2) / K in place of k / K: the midpoint rule has error 1 / K^2,
        theirs 1 / K.
    See also:
        `patch_positions`, `composition_scores`.
    Example:
        >>> from mechinterp import load
        >>> found = attribute_edges(load("checkpoints/sparse-h4-noise0.1-s0"), n_prompts=4)
        >>> found.patched.shape
        (3, 4, 4, 4, 4)
    """
    hooked = predictor_of(source).hooked
    if ig_steps < 1:
        raise ValueError(f"ig_steps must be >= 1, got {ig_steps}.")
    require_edges(hooked)
    clean, corrupted = clean_and_corrupted(source, clean, corrupted, n_prompts=n_prompts, seed=seed)
    if isinstance(hooked.model, ModuleHooks):
        query_positions(hooked, clean)
        require_sum(hooked.model, hooked.inputs(clean))
    pair = Pair.of(hooked, clean, corrupted, metric)
    estimate, patched = estimated_effects(pair, ig_steps), _patches(pair, progress)
    measured = estimates(
        estimate=mean_and_sem(estimate),
        patched=mean_and_sem(patched),
        rank_correlation=_rank_correlation(estimate, patched),
        total=mean_and_sem(pair.gained()),
    )
    return HeadEdges(ig_steps, **measured)


def estimated_effects(
    pair: Pair, ig_steps: int
) -> Float[np.ndarray, "prompt input layer head later_layer later_head"]:
    """First-order effects for each prompt."""
    hooked = pair.hooked
    gradients = _mean_gradients(pair, ig_steps)
    effects = _no_effects(pair)
    for layer, later in combinations(range(hooked.n_layers), 2):
        for index, component in enumerate(COMPONENTS):
            effect = einsum(
                pair.moved[layer],
                gradients[_read_name(later, component)],
                "batch pos head d_model, batch pos later d_model -> batch head later",
            )
            effects[:, index, layer, :, later] = effect.double().numpy(force=True)
    return effects


def _mean_gradients(pair: Pair, ig_steps: int) -> dict[str, Tensor]:
    """Gradient of each prompt's metric at the stream input of every head, averaged over points
    between corrupted and clean
    prompts: [batch, pos, head, d_model], by the name of the input."""
    later = range(1, pair.hooked.n_layers)
    names = [_read_name(*each) for each in product(later, COMPONENTS)]
    shares = [0.0] if ig_steps == 1 else [(k + 0.5) / ig_steps for k in range(ig_steps)]
    totals: dict[str, Tensor] = {}
    for share in shares:
        tokens = torch.lerp(pair.corrupted, pair.clean, share).detach().requires_grad_()
        with torch.enable_grad():
            output, passed = noted_run(pair.hooked, tokens, [*names, *map(resid_name, later)])
            # Prompts do not interact in the model: the gradient of the sum holds that of each
            # prompt's own metric.
            read = [passed[name] for name in names]
            outer = torch.autograd.grad(pair.metric(output).sum(), read, retain_graph=True)
            for name, values, gradient in zip(names, read, outer, strict=True):
                stream = passed[resid_name(int(name.split(".")[1]))]
                through = (values * gradient).sum((0, 1, 3))
                each = [torch.autograd.grad(t, stream, retain_graph=True)[0] for t in through]
                totals[name] = totals.get(name, 0) + torch.stack(each, 2) / ig_steps
    return totals


def noted_run(
    hooked: HookedPredictor,
    tokens: Tensor,
    names: Sequence[str],
    hooks: Hooks = (),
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's output and the values at some hook points, with other hooks applied first."""
    passed: dict[str, Tensor] = {}

    def keep(values: Tensor, hook: object, *, name: str) -> Tensor:
        passed[name] = values
        return values  # a Bridge uses the returned value

    noted = [(name, partial(keep, name=name)) for name in names]
    return hooked.model.run_with_hooks(tokens, fwd_hooks=[*hooks, *noted], **options), passed


@torch.no_grad()
def _patches(
    pair: Pair, progress: ProgressCallback
) -> Float[np.ndarray, "prompt input layer head later_layer later_head"]:
    """Effect of patching each edge, for each prompt.

    A first run, with the head's clean output added to the stream before the later layer, gives the
    input of the later head. That input is then put into a second run in which nothing else is
    changed. A model that can start at a layer starts both runs at the later one, with several inputs
    patched side by side."""
    hooked, effects = pair.hooked, _no_effects(pair)
    n_layers, n_heads, batch = hooked.n_layers, hooked.n_heads, len(pair.corrupted)
    output, streams = noted_run(hooked, pair.corrupted, list(map(resid_name, range(n_layers))))
    full, together = pair.metric(output), max(1, ROWS // batch) if hooked.restarts else 1
    places = list(product(range(len(COMPONENTS)), range(n_heads)))
    sources = [(layer, head) for layer in range(n_layers - 1) for head in range(n_heads)]
    for layer, head in progress(sources, "patching edges"):
        moved = pair.moved[layer][:, :, head]
        for later in range(layer + 1, n_layers):
            names = [_read_name(later, component) for component in COMPONENTS]
            start = {"start_at_layer": later} if hooked.restarts else {}
            tokens = streams[resid_name(later)] if hooked.restarts else pair.corrupted
            shift = [(resid_name(later), partial(_added, more=moved))]
            _, read = noted_run(hooked, tokens, names, shift, **start)
            for first in range(0, len(places), together):
                some = places[first : first + together]
                repeated = tokens.repeat(len(some), *[1] * (tokens.ndim - 1))
                hooks = []
                for index, name in enumerate(names):
                    if at := [
                        (run, place[1]) for run, place in enumerate(some) if place[0] == index
                    ]:
                        hooks.append((name, partial(_put_in_run, at=at, values=read[name])))
                output, _ = noted_run(hooked, repeated, (), hooks, **start)
                for (index, reader), one in zip(some, output.split(batch), strict=True):
                    change = (pair.metric(one) - full).double().numpy(force=True)
                    effects[:, index, layer, head, later, reader] = change
    return effects


def _put_in_run(
    own: Tensor, hook: object, *, at: Sequence[tuple[int, int]], values: Tensor
) -> Tensor:
    """Hook that replaces one head's activation in each of some runs, which lie one after another."""
    own = own.clone()
    for run, head in at:
        own[run * len(values) : (run + 1) * len(values), :, head] = values[:, :, head]
    return own


def _added(stream: Tensor, hook: object, *, more: Tensor) -> Tensor:
    return stream + more


def _no_effects(pair: Pair) -> Float[np.ndarray, "prompt input layer head later_layer later_head"]:
    """Array of NaN for all pairs of heads."""
    shape = (pair.hooked.n_layers, pair.hooked.n_heads)
    return np.full((len(pair.clean), len(COMPONENTS), *shape, *shape), np.nan)


def _rank_correlation(estimate: np.ndarray, patched: np.ndarray) -> tuple[float, float]:
    """Spearman correlation of the means over edges, and its bootstrap standard deviation over
    prompts."""
    edges = np.isfinite(patched[0])
    both = np.stack([estimate[:, edges], patched[:, edges]])
    again = [
        rank_correlation(*np.tensordot(shares, both, axes=(0, 1)))
        for shares in resampled(len(patched))
    ]
    return rank_correlation(*both.mean(1)), float(np.std(again, ddof=1))


def require_edges(hooked: HookedPredictor) -> None:
    """Refuse models without edges between heads.

    Raises:
        ValueError: If there is one layer, the stream is not a sum, or inputs of heads have no hooks.
    """
    if hooked.n_layers < 2:
        raise ValueError(
            f"model must have at least 2 layers to have edges between heads, got {hooked.n_layers}."
        )
    model = hooked.model
    blocks: Sequence[object] = model.blocks  # type: ignore[assignment]
    if not all(getattr(block, "hook_out_is_single_residual_stream", True) for block in blocks):
        raise ValueError(
            "model must have a residual stream that is the sum of all outputs, got a norm after each layer."
        )
    unfollowed = getattr(model, "unfollowed", {})
    for layer, component in product(range(1, hooked.n_layers), COMPONENTS):
        if _read_name(layer, component) not in model.hook_dict:
            why = f": {unfollowed[layer]}" if layer in unfollowed else ""
            raise ValueError(
                f"model must have hooks on its queries, keys and values, such as {_read_name(layer, component)}; this "
                f"{type(model).__name__} has none{why}."
            )


def _read_name(layer: int, component: str) -> str:
    """Name of the hook on the query, key or value of all heads of a layer, [batch, pos, head,
    d_head]."""
    return f"blocks.{layer}.attn.hook_{component}"


def edge_name(edge: Any) -> str:
    """Text such as "L0H1 to v of L2H3", from a row of the frame."""
    return f"L{edge.layer}H{edge.head} to {edge.input} of L{edge.later_layer}H{edge.later_head}"
