"""Effects of edges between nodes of a model: attribution patching, checked by patching each edge.

An edge goes from what a node writes (a head, an MLP, the input) to what a later node reads (the query, key or value of a
head, an MLP, the output). Its effect is the change of a metric on corrupted prompts when this one reader gets what the
sender writes on the clean prompts. A circuit is the model with some edges only: `faithfulness` says how much of its
prediction stays.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.patching.pairing import (
    Metric,
    Node,
    Pair,
    clean_and_corrupted,
    graph_of,
    hooks_of,
    layer_of,
    written_at,
)
from mechinterp.analysis.stats import (
    estimates,
    mean_and_sem,
    rank_correlation,
    ratio_and_sem,
    resampled,
)
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.gradients import require_gradients
from mechinterp.models.hooked.hooks import Hooks
from mechinterp.models.hooked.masks import require_sum, resid_name
from mechinterp.models.hooked.module import ModuleHooks
from mechinterp.models.hooked.runner import HookedPredictor, query_positions
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import progress

LISTED = 12
N_PAIRS = 32
"""Default number of pairs of prompts; every edge needs one run on them."""
ROWS = 256
"""Number of prompts that run side by side, several edges into one layer together."""


@dataclass(frozen=True, eq=False, repr=False)
class EdgeEffects(Result):
    """Effects of edges: change of the prediction that one node causes through another."""

    ig_steps: int
    """Number of points between the corrupted and the clean prompts at which gradients are taken."""
    senders: tuple[str, ...]
    """Nodes that write: heads such as "L0H1"; with nodes="all" also "input" and MLPs such as "L0MLP"."""
    receivers: tuple[str, ...]
    """Nodes that read: "L2H3.q", ".k" or ".v"; with nodes="all" also MLPs and "output"."""
    estimate: Float[np.ndarray, "sender receiver"]
    """First-order effect of each edge, mean over prompts, in units of the metric; NaN if the receiver does not come
    after the sender."""
    estimate_sem: Float[np.ndarray, "sender receiver"]
    """Standard error of `estimate` over prompts."""
    patched: Float[np.ndarray, "sender receiver"]
    """Effect of each edge when it is patched, mean over prompts, in units of the metric."""
    patched_sem: Float[np.ndarray, "sender receiver"]
    """Standard error of `patched` over prompts."""
    rank_correlation: float
    """Spearman correlation of `estimate` and `patched` over the edges; NaN if no edge has an effect."""
    rank_correlation_sem: float
    """Bootstrap standard error of `rank_correlation` over prompts."""
    total: float
    """Metric on the clean prompts minus metric on the corrupted prompts."""
    total_sem: float

    def __repr__(self) -> str:
        top = self.to_frame().iloc[0]
        return (
            f"EdgeEffects({top['from']} to {top['to']} {top['patched']:+.3g} ± {top['patched_sem']:.2g} of {self.total:+.3g}; "
            f"rank correlation of estimates (ig_steps={self.ig_steps}) and patches {self.rank_correlation:.3f} ± "
            f"{self.rank_correlation_sem:.2g})"
        )

    def sentences(self) -> list[str]:
        """The largest effects, and the agreement of gradients with patching."""
        frame = self.to_frame()
        named = ", ".join(
            f"{edge['from']} to {edge['to']} ({with_error(edge['patched'], edge['patched_sem'])})"
            for edge in frame.head(3).to_dict("records")
        )
        return [
            f"Other task vectors move the prediction by {with_error(self.total, self.total_sem)} y² (mean squared "
            f"distance). Largest effects of edges, each patched alone: {named}.",
            f"Rank correlation of gradient estimates and patching over {len(frame)} edges: "
            f"{with_error(self.rank_correlation, self.rank_correlation_sem)}.",
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per edge, the largest effect first."""
        axes = {"from": self.senders, "to": self.receivers}
        frame = frame_of(self, *with_sem("estimate", "patched"), **axes).dropna(subset=["patched"])
        return frame.sort_values("patched", key=np.abs, ascending=False, ignore_index=True)

    def plot(self) -> go.Figure:
        """Edges with the largest effects, estimated and patched."""
        top = self.to_frame().head(LISTED)
        return figures.bars(
            (top["from"] + " to " + top["to"]).tolist(),
            {
                name: (top[column].to_numpy(), top[f"{column}_sem"].to_numpy())
                for name, column in (("estimated", "estimate"), ("patched", "patched"))
            },
            title="Effect of edges",
            y_title="change of the metric",
        )


@torch.inference_mode(False)
def attribute_edges(
    source: Source,
    clean: Prompts | None = None,
    corrupted: Prompts | None = None,
    *,
    nodes: str = "heads",
    ig_steps: int = 1,
    metric: Metric | None = None,
    n_prompts: int = N_PAIRS,
    seed: int = 0,
) -> EdgeEffects:
    r"""Effects of all edges, estimated by gradients and measured by patching one edge at a time.

    estimate(u -> v) = sum over positions of (w_u(clean) - w_u(corrupted)) . mean_k dm/dr_v(x_k),
    x_k = corrupted + (k - 1/2) / K (clean - corrupted), k = 1..K = ig_steps; for K = 1, x_1 = corrupted

    with w_u what node u writes (z_u W_O for a head), r_v the stream that node v reads (before any norm), and m the metric.

    Args:
        clean: Clean prompts; None draws `n_prompts` of the model's own task with `seed`.
        corrupted: Corrupted prompts; None means the clean ones with other task vectors, drawn with `seed` + 1. The
            covariates are then the same on both, so that edges that depend on covariates alone have no effect.
        nodes: "heads" for edges from heads to heads of later layers. "all" for the graph of the whole model: from the
            input (tokens as embedded, with positions), heads and MLPs to heads, MLPs and the output.
        ig_steps: 1 for attribution patching (EAP). More for integrated gradients (EAP-IG), which average the gradient
            between corrupted and clean prompts. The effect of a single patch is closer to EAP: a patch is a small step
            from the corrupted prompts.
        metric: Function from the model's output to one number per prompt; None means minus the squared distance between
            the prediction and that on the clean prompts, unit y^2.
    Raises:
        ValueError: If ig_steps is below 1, there are fewer than two prompts, the model has no edges, its stream is not
            the sum of outputs (a norm after each layer, layers that are not the stream), what a node reads or writes has
            no hook, or the prompts differ in shape.
    Source:
        Edges and patches are those of transformer_lens 4.3; a test compares both (Syed et al. 2023, arXiv 2310.10348;
        Wang et al. 2022, arXiv 2211.00593). Integrated gradients follow Hanna et al. 2024, arXiv 2403.17806, with
        (k - 1/2) / K in place of k / K: the midpoint rule has error 1 / K^2, theirs 1 / K.
    See also:
        `faithfulness`, `patch_positions`, `composition_scores`.
    Example:
        >>> from mechinterp import load
        >>> checkpoint = load("checkpoints/sparse-h4-noise0.1-s0")
        >>> len(attribute_edges(checkpoint, n_prompts=4).to_frame())
        288
        >>> attribute_edges(checkpoint, n_prompts=4, nodes="all").senders[:3]
        ('input', 'L0H0', 'L0H1')
    """
    hooked = predictor_of(source).hooked
    if ig_steps < 1:
        raise ValueError(f"ig_steps must be >= 1, got {ig_steps}.")
    graph_of(hooked, nodes)  # refused before prompts are drawn
    clean, corrupted = clean_and_corrupted(source, clean, corrupted, n_prompts=n_prompts, seed=seed)
    if isinstance(hooked.model, ModuleHooks):
        query_positions(hooked, clean)
        require_sum(hooked.model, hooked.inputs(clean))
    pair = Pair.of(hooked, clean, corrupted, metric=metric, nodes=nodes)
    if isinstance(hooked.model, ModuleHooks):
        read = [name for node in pair.receivers for name in (node.hook, node.stream)]
        require_gradients(hooked, hooked.inputs(clean[:2]), read)
    estimate, patched = estimated_effects(pair, ig_steps), _patches(pair)
    measured = estimates(
        estimate=mean_and_sem(estimate),
        patched=mean_and_sem(patched),
        rank_correlation=_rank_correlation(estimate, patched),
        total=mean_and_sem(pair.gained()),
    )
    senders, receivers = (
        tuple(node.name for node in each) for each in (pair.senders, pair.receivers)
    )
    return EdgeEffects(ig_steps, senders, receivers, **measured)


def estimated_effects(pair: Pair, ig_steps: int) -> Float[np.ndarray, "prompt sender receiver"]:
    """First-order effects for each prompt; NaN where there is no edge."""
    effects = einsum(
        pair.moved,
        _mean_gradients(pair, ig_steps),
        "batch pos sender d_model, batch pos receiver d_model -> batch sender receiver",
    )
    return np.where(pair.edges, effects.double().numpy(force=True), np.nan)


def _mean_gradients(pair: Pair, ig_steps: int) -> Float[Tensor, "batch pos receiver d_model"]:
    """Gradient of each prompt's metric at the stream that each receiver reads, averaged over points between corrupted and
    clean prompts."""
    hooks = {name for node in pair.receivers for name in (node.hook, node.stream)}
    shares = [0.0] if ig_steps == 1 else [(k + 0.5) / ig_steps for k in range(ig_steps)]
    total = pair.moved.new_zeros(())
    for share in shares:
        tokens = torch.lerp(pair.corrupted, pair.clean, share).detach().requires_grad_()
        with torch.enable_grad():
            output, passed = noted_run(pair.hooked, tokens, hooks)
            computed = {node.hook: passed[node.hook] for node in pair.receivers}
            # Prompts do not interact in the model: the gradient of the sum holds that of each prompt's own metric.
            at = torch.autograd.grad(
                pair.metric(output).sum(), list(computed.values()), retain_graph=True
            )
            outer = dict(zip(computed, at, strict=True))
            each = [_through(node, passed, outer[node.hook]) for node in pair.receivers]
        total = total + torch.stack(each, 2) / ig_steps
    return total


def _through(node: Node, passed: dict[str, Tensor], outer: Tensor) -> Tensor:
    """Gradient at the stream through one receiver alone, from the gradient at what it computes."""
    if node.hook == node.stream:
        return outer
    along = passed[node.hook] * outer
    along = along if node.head is None else along[:, :, node.head]
    return torch.autograd.grad(along.sum(), passed[node.stream], retain_graph=True)[0]


def noted_run(
    hooked: HookedPredictor,
    tokens: Tensor,
    names: Iterable[str],
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
def _patches(pair: Pair) -> Float[np.ndarray, "prompt sender receiver"]:
    """Effect of patching each edge, for each prompt; NaN where there is no edge.

    A first run, with the sender's change added to a stream, gives what the receivers of this stream compute from it.
    That is then put into a second run in which nothing else is changed, several receivers side by side. A model that can
    start at a layer starts both runs at the layer of the receivers.
    """
    hooked, edges, batch = pair.hooked, pair.edges, len(pair.corrupted)
    effects = np.full((batch, *edges.shape), np.nan)
    layers = sorted({layer_of(node.hook) for node in pair.receivers})
    output, streams = noted_run(hooked, pair.corrupted, map(resid_name, layers))
    full, together = pair.metric(output), max(1, ROWS // batch) if hooked.restarts else 1
    for sender in progress(range(len(pair.senders)), "patching edges"):
        later = np.flatnonzero(edges[sender]).tolist()
        add = partial(_added, more=pair.moved[:, :, sender])
        for stream, group in groupby(later, lambda index: pair.receivers[index].stream):
            layer, some = layer_of(stream), list(group)
            start = {"start_at_layer": layer} if hooked.restarts else {}
            tokens = streams[resid_name(layer)] if hooked.restarts else pair.corrupted
            names = {pair.receivers[index].hook for index in some}
            _, read = noted_run(hooked, tokens, names, [(stream, add)], **start)
            for first in range(0, len(some), together):
                chunk = some[first : first + together]
                repeated = tokens.repeat(len(chunk), *[1] * (tokens.ndim - 1))
                hooks = []
                for name in names:
                    nodes = {run: pair.receivers[index] for run, index in enumerate(chunk)}
                    at = {run: node.head for run, node in nodes.items() if node.hook == name}
                    hooks.append((name, partial(_put_in_runs, at=at, values=read[name])))
                output, _ = noted_run(hooked, repeated, (), hooks, **start)
                for index, one in zip(chunk, output.split(batch), strict=True):
                    change = pair.metric(one) - full
                    effects[:, sender, index] = change.double().numpy(force=True)
    return effects


def _put_in_runs(own: Tensor, hook: object, *, at: dict[int, int | None], values: Tensor) -> Tensor:
    """Hook that replaces what one head, or an MLP or the output, computes in some of the runs, which lie one after
    another."""
    own = own.clone()
    for run, head in at.items():
        place = slice(None) if head is None else head
        own[run * len(values) : (run + 1) * len(values), :, place] = values[:, :, place]
    return own


def _added(stream: Tensor, hook: object, *, more: Tensor) -> Tensor:
    return stream + more


def _rank_correlation(estimate: np.ndarray, patched: np.ndarray) -> tuple[float, float]:
    """Spearman correlation of the means over edges, and its bootstrap standard deviation over prompts."""
    edges = np.isfinite(patched[0])
    both = np.stack([estimate[:, edges], patched[:, edges]])
    again = [
        rank_correlation(*np.tensordot(shares, both, axes=(0, 1)))
        for shares in resampled(len(patched))
    ]
    return rank_correlation(*both.mean(1)), float(np.std(again, ddof=1))


N_SIZES = 12
"""Default number of circuits that are measured."""


@dataclass(frozen=True, eq=False, repr=False)
class Faithfulness(Result):
    """Faithfulness of the circuits that the first edges of a ranking make.

    f(k) = (m(k) - m(0)) / (m(all) - m(0)), with m minus the squared distance to the full model's prediction when k
    edges are kept and all others carry the outputs of corrupted prompts.
    """

    n_edges: Int[np.ndarray, " size"]
    """Number of edges kept."""
    faithfulness: Float[np.ndarray, " size"]
    """f at each size: 0 without edges, 1 with all."""
    faithfulness_sem: Float[np.ndarray, " size"]
    """Standard error of `faithfulness` over prompts, for this ranking."""
    distance: Float[np.ndarray, " size"]
    """Mean squared distance of the circuit's prediction to the full model's, -m(k); unit y^2."""
    distance_sem: Float[np.ndarray, " size"]
    """Standard error of `distance` over prompts."""
    cpr: float
    """Area under f over the share of edges kept; 1 is the best where f does not exceed 1."""
    cpr_sem: float
    """Bootstrap standard error of `cpr` over prompts."""
    cmd: float
    """Area of |1 - f| over the share of edges kept; 0 is the best."""
    cmd_sem: float
    """Bootstrap standard error of `cmd` over prompts."""

    def __repr__(self) -> str:
        return (
            f"Faithfulness(CPR {self.cpr:.3f} ± {self.cpr_sem:.1g}, CMD {self.cmd:.3f} ± {self.cmd_sem:.1g}, "
            f"{self.n_edges[-1]} edges)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per size of the circuit."""
        return frame_of(self, *with_sem("faithfulness", "distance"), n_edges=self.n_edges)

    def plot(self) -> go.Figure:
        """Faithfulness over the number of edges kept."""
        return figures.lines(
            self.n_edges,
            {"circuit": (self.faithfulness, self.faithfulness_sem)},
            title="Faithfulness of the first edges",
            x_title="number of edges kept",
            y_title="faithfulness (0: no edge, 1: all edges)",
        )


@torch.inference_mode(False)
@torch.no_grad()
def faithfulness(
    source: Source,
    ranking: EdgeEffects | pd.DataFrame | None = None,
    clean: Prompts | None = None,
    corrupted: Prompts | None = None,
    *,
    nodes: str = "heads",
    sizes: Sequence[int] | None = None,
    n_prompts: int = N_PAIRS,
    seed: int = 0,
) -> Faithfulness:
    """Faithfulness of the circuits of the first edges of a ranking, over the number of edges.

    Between heads, what comes from the input and from MLPs and what goes to MLPs and to the output is always kept.

    Args:
        ranking: Result of `attribute_edges`, ranked by the size of the estimate; or a frame with columns "from" and "to"
            such as "L0H1" and "L2H3.v", the most important edge first, each edge once. None: by `attribute_edges` on the
            same prompts.
        clean: Clean prompts, on which the circuit runs; None draws `n_prompts` with `seed`.
        corrupted: Corrupted prompts; None means the clean ones with other task vectors.
        nodes: Graph without a ranking: "heads", or "all" for the whole model. A ranking names its own.
        sizes: Numbers of edges to keep; none and all are added. None means twelve, from one edge on.
    Raises:
        ValueError: If the model is not one of this package, or has one layer; if the ranking names other edges or
            misses one.
    Source:
        Mueller et al. 2025, "MIB", arXiv 2504.13151 (faithfulness, CPR and CMD). Their graphs are those of nodes="all".
    See also:
        `attribute_edges`.
    Example:
        >>> from mechinterp import load
        >>> checkpoint = load("sparse-h4-noise0.1-s0")
        >>> found = faithfulness(checkpoint, n_prompts=4)
        >>> found.faithfulness[[0, -1]].tolist()
        [0.0, 1.0]
    """
    clean, corrupted = clean_and_corrupted(source, clean, corrupted, n_prompts=n_prompts, seed=seed)
    if ranking is None:
        ranking = attribute_edges(source, clean, corrupted, nodes=nodes)
    edges = _ranked(ranking)
    nodes = "all" if (edges["to"] == "output").any() else "heads"
    pair = Pair.of(predictor_of(source).hooked, clean, corrupted, nodes=nodes)
    order = _order(edges, pair)
    asked = np.geomspace(1, len(order), N_SIZES).round() if sizes is None else np.array(sizes)
    counts = np.unique([0, len(order), *asked]).astype(int)
    if counts[0] < 0 or counts[-1] > len(order):
        raise ValueError(f"sizes must lie in 0 to {len(order)}, the number of edges, got {asked}.")
    values = []
    for count in progress(counts.tolist(), "keeping edges"):
        kept = np.zeros(pair.edges.shape, dtype=bool)
        kept[tuple(order[:count].T)] = True
        values.append(pair.metric(circuit_output(pair, kept)).double().numpy(force=True))
    metric = np.stack(values, 1)  # [prompt, size]
    gained = metric - metric[:, :1]
    found = ratio_and_sem(gained, gained[:, -1])
    cpr, cmd = _areas(found[0], counts)
    shares = resampled(len(gained))
    again = np.array([_areas(mean / mean[-1], counts) for mean in shares @ gained])
    cpr_sem, cmd_sem = again.std(axis=0, ddof=1)
    return Faithfulness(
        counts, *found, *mean_and_sem(-metric), cpr, float(cpr_sem), cmd, float(cmd_sem)
    )


def circuit_output(pair: Pair, kept: Bool[np.ndarray, "sender receiver"]) -> Tensor:
    """Output of the model on the clean prompts if every edge that is not kept carries what its sender writes on the
    corrupted prompts."""
    model: Any = pair.hooked.model
    writing, reading = hooks_of(pair.senders), defaultdict(list)
    for index, node in enumerate(pair.receivers):
        reading[node.own_input].append(index)
        if node.own_input not in model.hook_dict:
            raise ValueError(
                f"circuits of edges need a model with the hook {node.own_input}, got {type(model).__name__} without it."
            )
    _, cache = model.run_with_cache(pair.corrupted, names_filter=writing)
    corrupted = {name: written_at(model, name, cache[name]) for name in writing}
    moved: list[Tensor] = []  # corrupted minus current output of the senders so far, by hook

    def note(values: Tensor, hook: object, *, name: str) -> None:
        moved.append(corrupted[name] - written_at(model, name, values))

    def shifted(own: Tensor, hook: object, *, receivers: list[int]) -> Tensor:
        if not moved:
            return own
        every = torch.cat(moved, dim=2)
        cut = torch.from_numpy(~kept[: every.shape[2], receivers]).to(own)
        shift = einsum(every, cut, "batch pos sender d, sender reader -> batch pos reader d")
        return own + (shift if own.ndim == 4 else shift[:, :, 0])

    hooks: Hooks = [
        *((name, partial(note, name=name)) for name in writing),
        *((name, partial(shifted, receivers=some)) for name, some in reading.items()),
    ]
    switches = "use_split_qkv_input", "use_hook_mlp_in"
    before = {name: getattr(model.cfg, name) for name in switches}
    try:
        for name in switches:
            getattr(model, f"set_{name}")(True)
        return model.run_with_hooks(pair.clean, fwd_hooks=hooks)
    finally:
        for name, value in before.items():
            getattr(model, f"set_{name}")(value)


def _ranked(ranking: EdgeEffects | pd.DataFrame) -> pd.DataFrame:
    """Edges, the most important first, with the columns "from" and "to"."""
    if isinstance(ranking, EdgeEffects):
        frame = ranking.to_frame()
        return frame.sort_values("estimate", key=np.abs, ascending=False, kind="stable")
    if missing := [name for name in ("from", "to") if name not in ranking]:
        raise ValueError(
            f"ranking must have a column {missing[0]}, got {', '.join(map(str, ranking))}."
        )
    return ranking


def _order(edges: pd.DataFrame, pair: Pair) -> Int[np.ndarray, "edge 2"]:
    """Indices of the senders and receivers of the edges."""
    places = [
        {node.name: index for index, node in enumerate(each)}
        for each in (pair.senders, pair.receivers)
    ]
    ends = zip(edges["from"], edges["to"], strict=True)
    order = [(places[0].get(one), places[1].get(two)) for one, two in ends]
    if len(order) != pair.edges.sum() or set(order) != set(map(tuple, np.argwhere(pair.edges))):
        raise ValueError(
            f"ranking must name each of the {pair.edges.sum()} edges of the model once."
        )
    return np.array(order, dtype=int)


def _areas(
    found: Float[np.ndarray, " size"], counts: Int[np.ndarray, " size"]
) -> tuple[float, float]:
    """Areas under f and under |1 - f| over the share of edges kept."""
    share = counts / counts[-1]
    return float(np.trapezoid(found, share)), float(np.trapezoid(np.abs(1 - found), share))
