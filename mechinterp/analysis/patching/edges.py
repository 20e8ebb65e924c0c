"""Effects of edges between nodes of a model: attribution patching, checked by patching each edge.

An edge goes from what a node writes (a head, an MLP, the input) to what a later node reads (the query, key or value of a
head, an MLP, the output). Its effect is the change of a metric on corrupted prompts when this one reader gets what the
sender writes on the clean prompts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.ablation.measured import Metric
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.patching.pairing import (
    COMPONENTS,
    GraphPair,
    InputPair,
    Node,
    clean_and_corrupted,
    graph_of,
    layer_of,
    pair_of_weights,
)
from mechinterp.analysis.result import METRIC_UNIT
from mechinterp.analysis.stats import estimates, mean_and_sem, rank_correlation, resampled
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.gradients import require_gradients
from mechinterp.models.hooked.masks import require_sum, resid_name
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.run.evaluation import require_prompts
from mechinterp.models.run.layer_edges import LayerEdges
from mechinterp.models.run.linear_edges import EdgeMaps
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights
from mechinterp.progress import progress

EDGES_SHOWN = 12
"""Number of edges in the figure."""
N_EDGE_PAIRS = 32
"""Default number of pairs of prompts; every edge needs one run on them."""
PROMPTS_AT_ONCE = 256
"""Number of prompts that run side by side: several edges into one layer are patched together up to this number."""


@dataclass(frozen=True, eq=False, repr=False)
class EdgeEffects(Result):
    """Effects of edges: change of the prediction that one node causes through another."""

    COLUMNS: ClassVar = {
        "estimate": "First-order effect of each edge, mean over prompts; NaN if the receiver does not come after the sender.",
        "estimate_sem": "Standard error of estimate over prompts.",
        "patched": "Effect of each edge when it is patched, mean over prompts.",
        "patched_sem": "Standard error of patched over prompts.",
        "from": "Node that writes: the input, a head or an MLP.",
        "to": "Node that reads: the query, key or value of a head, an MLP or the output.",
    }
    UNITS: ClassVar = {METRIC_UNIT: ("estimate", "patched")}
    ig_steps: int
    """Number of points between the corrupted and the clean prompts at which gradients are taken."""
    senders: tuple[str, ...]
    """Nodes that write: heads such as "L0H1"; with nodes="all" also "input" and MLPs such as "L0MLP"."""
    receivers: tuple[str, ...]
    """Nodes that read: "L2H3.q", ".k" or ".v"; with nodes="all" also MLPs and "output"."""
    estimate: Float[np.ndarray, "sender receiver"]
    estimate_sem: Float[np.ndarray, "sender receiver"]
    patched: Float[np.ndarray, "sender receiver"]
    patched_sem: Float[np.ndarray, "sender receiver"]
    rank_correlation: float
    """Spearman correlation of `estimate` and `patched` over the edges; NaN if no edge has an effect."""
    rank_correlation_sem: float
    """Bootstrap standard error of `rank_correlation` over prompts."""
    total: float
    """Metric on the clean prompts minus metric on the corrupted prompts."""
    total_sem: float
    unit: str = "y²"
    """Unit of the metric; empty for a metric of the user's."""

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
        total = with_error(self.total, self.total_sem)
        moved = f"The metric on the clean prompts minus that on the corrupted ones is {total}."
        if self.unit:
            moved = f"The corrupted prompts move the prediction by {total} {self.unit} (mean squared distance)."
        return [
            f"{moved} Largest effects of edges, each patched alone: {named}.",
            f"Rank correlation of gradient estimates and patching over {len(frame)} edges: "
            f"{with_error(self.rank_correlation, self.rank_correlation_sem)}.",
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per edge, the largest effect first."""
        axes = {"from": self.senders, "to": self.receivers}
        frame = frame_of(self, *with_sem("estimate", "patched"), **axes).dropna(subset=["patched"])
        return frame.sort_values("patched", key=np.abs, ascending=False, ignore_index=True)

    def circuit(self, n_edges: int | None = None) -> pd.DataFrame:
        """The first edges by abs(estimate), as `circuit_faithfulness` takes them: one row per edge.

        The columns are "from", "to" and "nodes", the graph. A CSV file keeps the table unchanged.

        Args:
            n_edges: Number of edges; None means all.
        Raises:
            ValueError: If there are fewer edges, or `n_edges` is below 1.
        """
        edges = self.to_frame()
        n_edges = len(edges) if n_edges is None else n_edges
        if not 1 <= n_edges <= len(edges):
            raise ValueError(f"n_edges must lie in 1 to {len(edges)}, got {n_edges}.")
        first = edges.sort_values("estimate", key=np.abs, ascending=False, kind="stable")[:n_edges]
        nodes = "all" if "output" in self.receivers else "heads"
        return first[["from", "to"]].assign(nodes=nodes).reset_index(drop=True)

    def plot(self) -> go.Figure:
        """Edges with the largest effects, estimated and patched."""
        top = self.to_frame().head(EDGES_SHOWN)
        return figures.bars(
            (top["from"] + " to " + top["to"]).tolist(),
            {
                name: (top[column].to_numpy(), top[f"{column}_sem"].to_numpy())
                for name, column in (("estimated", "estimate"), ("patched", "patched"))
            },
            title="Effect of edges",
            y_title=f"change of the metric{f' ({self.unit})' if self.unit else ''}",
        )


@torch.inference_mode(False)
def attribute_edges(
    source: Source,
    prompts: Prompts | None = None,
    *,
    corrupted: Prompts | None = None,
    nodes: str = "heads",
    ig_steps: int = 1,
    metric: Metric | None = None,
    task: TaskLike | None = None,
    n_prompts: int = N_EDGE_PAIRS,
    seed: int = 0,
) -> EdgeEffects:
    r"""Effects of all edges, estimated by gradients and measured by patching one edge at a time.

    estimate(u -> v) = sum over positions of (w_u(clean) - w_u(corrupted)) . mean_k dm/dr_v(x_k),
    x_k = corrupted + (k - 1/2) / K (clean - corrupted), k = 1..K = ig_steps; for K = 1, x_1 = corrupted

    with w_u what node u writes (z_u W_O for a head), r_v the stream that node v reads (before any norm), and m the metric.

    Args:
        prompts: Clean prompts; None draws `n_prompts` of the model's own task with `seed`.
        corrupted: None: the clean prompts with other task vectors, drawn with `seed` + 1. Covariates are then the same,
            so that edges that depend on them alone have no effect.
        nodes: "heads": edges from heads to heads of later layers. "all": also from the input (embedded tokens with
            positions) and MLPs, and to MLPs and the output.
        ig_steps: 1 for attribution patching (EAP), to which the effect of a single patch is closer, as it is a small step
            from the corrupted prompts; more for integrated gradients (EAP-IG), up to the clean prompts.
        metric: Function from predictions [batch, d_y] and the clean prompts to one number per prompt; None: minus the
            squared distance between the prediction and that on the clean prompts, unit y^2.
        task: Law of drawn prompts; None: the model's own.
    Raises:
        ValueError: If ig_steps is below 1, there are fewer than two prompts, the model has no edges, its stream is not
            the sum of outputs, a node has no hook, the prompts differ in shape, or the metric gives no number per prompt.
    Source:
        Edges and patches are those of transformer_lens 4.3; a test compares both (Syed et al. 2023, arXiv 2310.10348;
        Wang et al. 2022, arXiv 2211.00593). Integrated gradients follow Hanna et al. 2024, arXiv 2403.17806, with
        (k - 1/2) / K in place of k / K: the midpoint rule has error 1 / K^2, theirs 1 / K.
    See also:
        `circuit_faithfulness`, `patch_activations`.
    Example:
        >>> from mechinterp import load
        >>> checkpoint = load("checkpoints/sparse-h4-noise0.1-s0")
        >>> edges = attribute_edges(checkpoint, n_prompts=8)
        >>> len(edges.to_frame()), edges.circuit(2).columns.tolist()
        (288, ['from', 'to', 'nodes'])
        >>> attribute_edges(checkpoint, n_prompts=8, nodes="all").senders[:3]
        ('input', 'L0H0', 'L0H1')
    """
    require_prompts(prompts, "attribute_edges")
    predictor = predictor_of(source)
    if ig_steps < 1:
        raise ValueError(f"ig_steps must be >= 1, got {ig_steps}.")
    weights = None if predictor.is_hooked else predictor.weights
    if weights is not None and not _weights_suffice(weights, nodes):
        weights = None
    if weights is None:
        graph_of(predictor.hooked, nodes)  # refused before prompts are drawn
    drawn: dict = {"task": task, "n_prompts": n_prompts, "seed": seed}
    clean, corrupted = clean_and_corrupted(
        source, prompts, corrupted, analysis="attribute_edges", **drawn
    )
    if weights is not None:
        pair = pair_of_weights(weights, clean, corrupted, metric=metric, nodes=nodes)
        found = _effects_of(pair, *_by_weights(pair, weights, ig_steps), ig_steps)
    else:
        hooked_pair = _checked_pair(predictor.hooked, clean, corrupted, metric, nodes)
        effects = estimated_effects(hooked_pair, ig_steps), _patches(hooked_pair)
        found = _effects_of(hooked_pair, *effects, ig_steps)
    return found if metric is None else replace(found, unit="")


def _weights_suffice(weights: Weights, nodes: str) -> bool:
    """True if the effects follow from the weights: no recurrent layers or MLPs among the nodes, and a graph with edges."""
    model = weights.model
    a_sum = model.norm != "after" and not model.recurrent
    return a_sum and (
        (nodes == "heads" and model.n_layers > 1) or (nodes == "all" and model.d_mlp is None)
    )


def _effects_of(
    pair: GraphPair, estimate: np.ndarray, patched: np.ndarray, ig_steps: int
) -> EdgeEffects:
    """Effects of all edges from those for each prompt."""
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


def _checked_pair(
    hooked: HookedPredictor, clean: Prompts, corrupted: Prompts, metric: Metric | None, nodes: str
) -> InputPair:
    """The model on both kinds of prompts; a hooked module must have a stream that sums its outputs, and gradients."""
    from mechinterp.models.hooked.module import ModuleHooks  # loads TransformerLens

    if not isinstance(hooked.model, ModuleHooks):
        return InputPair.of(hooked, clean, corrupted, metric=metric, nodes=nodes)
    query_positions(hooked, clean)
    require_sum(hooked, hooked.inputs(clean))
    pair = InputPair.of(hooked, clean, corrupted, metric=metric, nodes=nodes)
    read = [name for node in pair.receivers for name in (node.hook, node.stream)]
    require_gradients(hooked, hooked.inputs(clean[:2]), read)
    return pair


@torch.no_grad()
def _by_weights(
    pair: GraphPair, weights: Weights, ig_steps: int
) -> tuple[
    Float[np.ndarray, "prompt sender receiver"], Float[np.ndarray, "prompt sender receiver"]
]:
    """Estimated and patched effects from the weights, for each prompt; NaN where there is no edge. A linear stack is a map
    of its tokens."""
    tokens, edges = (pair.clean, pair.corrupted), pair.edges
    linear = weights.model.stack == "linear"
    maps = EdgeMaps.of(weights, *tokens) if linear else LayerEdges(weights, *tokens)
    estimate, patched = (np.full((len(pair.clean), *edges.shape), np.nan) for _ in range(2))
    full, gradients = pair.metric(maps.output), _estimates_by_layer(pair, maps, ig_steps)
    places = [_place(node, weights.n_layers) for node in pair.receivers]
    for sender in progress(range(len(pair.senders)), "patching edges"):
        node = pair.senders[sender]
        layer, _, head = _place(node, weights.n_layers)
        own = 0 if node.head is None else 1 + layer * weights.n_heads + head
        outputs: dict[int, Tensor] = {}
        for receiver in np.flatnonzero(edges[sender]):
            layer, *place = places[receiver]
            if layer not in outputs:
                outputs[layer] = maps.patched(own, layer)
            change = pair.metric(outputs[layer][*place]) - full
            patched[:, sender, receiver] = change.double().numpy(force=True)
            estimate[:, sender, receiver] = gradients[layer][own, *place].double().numpy(force=True)
    return estimate, patched


def _estimates_by_layer(
    pair: GraphPair, maps: EdgeMaps | LayerEdges, ig_steps: int
) -> dict[int, Float[Tensor, "sender part head batch"]]:
    """First-order effects by layer that reads, from gradients averaged over points between corrupted and clean prompts."""
    shares = _shares(ig_steps)
    found = [dict(maps.estimates(pair.metric, share)) for share in shares]
    return {
        layer: reduce(torch.add, [each[layer] for each in found]) / len(shares)
        for layer in found[0]
    }


def _place(node: Node, n_layers: int) -> tuple[int, int, int]:
    """Layer of a node of heads, part (query, key, value) and head as in `EdgeMaps.patched`; the number of layers for the
    output."""
    if node.head is None:
        return n_layers, 0, 0
    part = node.name.rpartition(".")[2]
    return layer_of(node.hook), COMPONENTS.index(part) if part in COMPONENTS else 0, node.head


def _shares(ig_steps: int) -> list[float]:
    """Points between the corrupted (0) and the clean prompts (1) at which gradients are taken."""
    return [0.0] if ig_steps == 1 else [(k + 0.5) / ig_steps for k in range(ig_steps)]


def estimated_effects(
    pair: InputPair, ig_steps: int
) -> Float[np.ndarray, "prompt sender receiver"]:
    """First-order effects for each prompt; NaN where there is no edge."""
    effects = einsum(
        pair.moved,
        _mean_gradients(pair, ig_steps),
        "batch pos sender d_model, batch pos receiver d_model -> batch sender receiver",
    )
    return np.where(pair.edges, effects.double().numpy(force=True), np.nan)


def _mean_gradients(pair: InputPair, ig_steps: int) -> Float[Tensor, "batch pos receiver d_model"]:
    """Gradient of each prompt's metric at the stream that each receiver reads, averaged over points between corrupted and
    clean prompts."""
    hooks = {name for node in pair.receivers for name in (node.hook, node.stream)}
    total = pair.moved.new_zeros(())
    for share in _shares(ig_steps):
        tokens = torch.lerp(pair.corrupted, pair.clean, share).detach().requires_grad_()
        with torch.enable_grad():
            output, passed = pair.hooked.run_noting(tokens, hooks)
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


@torch.no_grad()
def _patches(pair: InputPair) -> Float[np.ndarray, "prompt sender receiver"]:
    """Effect of patching each edge, for each prompt; NaN where there is no edge."""
    hooked, edges = pair.hooked, pair.edges
    effects = np.full((len(pair.corrupted), *edges.shape), np.nan)
    layers = sorted({layer_of(node.hook) for node in pair.receivers})
    output, streams = hooked.run_noting(pair.corrupted, map(resid_name, layers))
    full = pair.metric(output)
    for sender in progress(range(len(pair.senders)), "patching edges"):
        later = np.flatnonzero(edges[sender]).tolist()
        for stream, group in groupby(later, lambda index: pair.receivers[index].stream):
            for receiver, patched in _patched_readers(pair, sender, stream, list(group), streams):
                effects[:, sender, receiver] = (patched - full).double().numpy(force=True)
    return effects


def _patched_readers(
    pair: InputPair, sender: int, stream: str, readers: list[int], streams: dict[str, Tensor]
) -> Iterator[tuple[int, Float[Tensor, " batch"]]]:
    """Metric when one reader of a stream gets the sender's change, for each of its readers.

    A first run, with the sender's change added to the stream, gives what the readers compute from it. A second run gets
    these values at one reader and is otherwise unchanged; the runs of several readers lie side by side. A model that can
    start at a layer starts both runs at the layer of the readers.
    """
    hooked, layer, batch = pair.hooked, layer_of(stream), len(pair.corrupted)
    start = {"start_at_layer": layer} if hooked.restarts else {}
    tokens = streams[resid_name(layer)] if hooked.restarts else pair.corrupted
    names = {pair.receivers[index].hook for index in readers}
    add = partial(_added, more=pair.moved[:, :, sender])
    _, read = hooked.run_noting(tokens, names, [(stream, add)], **start)
    together = max(1, PROMPTS_AT_ONCE // batch) if hooked.restarts else 1
    for first in range(0, len(readers), together):
        chunk = readers[first : first + together]
        nodes = [pair.receivers[index] for index in chunk]
        repeated = tokens.repeat(len(chunk), *[1] * (tokens.ndim - 1))
        hooks = []
        for name in names:
            at = {run: node.head for run, node in enumerate(nodes) if node.hook == name}
            hooks.append((name, partial(_put_in_runs, at=at, values=read[name])))
        output, _ = hooked.run_noting(repeated, (), hooks, **start)
        yield from zip(chunk, map(pair.metric, output.split(batch)), strict=True)


def _put_in_runs(own: Tensor, hook: object, *, at: dict[int, int | None], values: Tensor) -> Tensor:
    """Hook that replaces what one head, an MLP or the output computes in some of the runs.

    Args:
        own: Values of all runs; the prompts of a run stand together.
        at: Head whose values are replaced, by run; None replaces all values.
    """
    own = own.clone()
    for run, head in at.items():
        place = slice(None) if head is None else head
        own[run * len(values) : (run + 1) * len(values), :, place] = values[:, :, place]
    return own


def _added(stream: Tensor, hook: object, *, more: Tensor) -> Tensor:
    """Hook that adds to a stream."""
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
