"""Effects of edges between nodes of a model: attribution patching, checked by patching each edge.

An edge goes from what a node writes (a head, an MLP, the input) to what a later node reads (the query, key or value of a
head, an MLP, the output). Its effect is the change of a metric on corrupted prompts when this one reader gets what the
sender writes on the clean prompts.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.ablation.measured import Metric
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.patching.edges_by_hooks import by_hooks, checked_pair
from mechinterp.analysis.patching.edges_by_weights import by_weights, weights_alone
from mechinterp.analysis.patching.graph import graph_of
from mechinterp.analysis.patching.pairing import GraphPair, clean_and_corrupted, pair_of_weights
from mechinterp.analysis.result import METRIC_UNIT
from mechinterp.analysis.stats import estimates, mean_and_sem, rank_correlation, resampled
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import require_prompts
from mechinterp.models.run.predictor import Source, predictor_of

EDGES_SHOWN = 12
"""Number of edges in the figure."""
N_EDGE_PAIRS = 32
"""Default number of pairs of prompts; every edge needs one run on them."""


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
    if ig_steps < 1:
        raise ValueError(f"ig_steps must be >= 1, got {ig_steps}.")
    predictor = predictor_of(source)
    weights = weights_alone(predictor, nodes)
    if weights is None:
        graph_of(predictor.hooked, nodes)  # refused before prompts are drawn
    drawn: dict = {"task": task, "n_prompts": n_prompts, "seed": seed}
    both = clean_and_corrupted(source, prompts, corrupted, analysis="attribute_edges", **drawn)
    if weights is not None:
        pair = pair_of_weights(weights, *both, metric=metric, nodes=nodes)
        found = _effects_of(pair, *by_weights(pair, weights, ig_steps), ig_steps)
    else:
        hooked_pair = checked_pair(predictor.hooked, *both, metric, nodes)
        found = _effects_of(hooked_pair, *by_hooks(hooked_pair, ig_steps), ig_steps)
    return found if metric is None else replace(found, unit="")


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


def _rank_correlation(estimate: np.ndarray, patched: np.ndarray) -> tuple[float, float]:
    """Spearman correlation of the means over edges, and its bootstrap standard deviation over prompts."""
    edges = np.isfinite(patched[0])
    both = np.stack([estimate[:, edges], patched[:, edges]])
    again = [
        rank_correlation(*np.tensordot(shares, both, axes=(0, 1)))
        for shares in resampled(len(patched))
    ]
    return rank_correlation(*both.mean(1)), float(np.std(again, ddof=1))
