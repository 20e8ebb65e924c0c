"""Faithfulness of circuits: how much of a prediction stays when a model keeps some of its edges only."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.patching.edges import N_EDGE_PAIRS, attribute_edges
from mechinterp.analysis.patching.graph import GRAPHS
from mechinterp.analysis.patching.pairing import (
    InputPair,
    clean_and_corrupted,
    hooks_of,
    written_at,
)
from mechinterp.analysis.stats import mean_and_sem, ratio_and_sem, resampled
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.runner import class_name
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import progress

N_SIZES = 12
"""Default number of circuits that are measured."""
SPLIT_INPUTS = ("use_split_qkv_input", "use_hook_mlp_in")
"""Settings of a model that give every receiver its own copy of the stream."""
UNDEFINED = dict.fromkeys(("cpr", "cpr_sem", "cmd", "cmd_sem"), np.nan)
"""Areas of a circuit that lacks an edge of the model, or on prompts that no edge changes."""
Kept = Bool[np.ndarray, "sender receiver"]
"""True for the edges that a circuit keeps."""


@dataclass(frozen=True, eq=False, repr=False)
class CircuitFaithfulness(Result):
    """Faithfulness of the first edges of a circuit, over their number.

    f(k) = (m(k) - m(0)) / (m(all) - m(0)). Here m(k) is minus the squared distance to the full model's prediction when k
    edges are kept and all others carry the outputs of corrupted prompts. With all edges m is 0, its largest value: f is at
    most 1, and CMD = 1 - CPR. f is NaN if m(0) is 0, too: no edge changes a prediction.
    """

    COLUMNS: ClassVar = {
        "n_edges": "Number of edges kept; the last row keeps all edges of the model.",
        "faithfulness": "f at each size: 0 without edges, 1 with all.",
        "faithfulness_sem": "Standard error of faithfulness over prompts, for this order of the edges.",
        "distance": "Mean squared distance of the circuit's prediction to the full model's, -m(k).",
        "distance_sem": "Standard error of distance over prompts.",
    }
    UNITS: ClassVar = {"y²": ("distance",)}

    n_edges: Int[np.ndarray, " size"]
    faithfulness: Float[np.ndarray, " size"]
    faithfulness_sem: Float[np.ndarray, " size"]
    distance: Float[np.ndarray, " size"]
    distance_sem: Float[np.ndarray, " size"]
    n_circuit: int
    """Number of edges of the circuit."""
    cpr: float
    """Area under f over the share of edges kept; 1 is the best. NaN if the circuit lacks an edge of the model, or f is NaN."""
    cpr_sem: float
    """Bootstrap standard error of `cpr` over prompts."""
    cmd: float
    """Area of |1 - f| over the share of edges kept; 0 is the best. NaN where `cpr` is."""
    cmd_sem: float
    """Bootstrap standard error of `cmd` over prompts."""

    def __repr__(self) -> str:
        last = int(np.flatnonzero(self.n_edges == self.n_circuit)[0])
        kept = with_error(self.faithfulness[last], self.faithfulness_sem[last])
        return (
            f"CircuitFaithfulness({kept} with {self.n_circuit} of {self.n_edges[-1]} edges)"
            if np.isnan(self.cpr)
            else f"CircuitFaithfulness(CPR {with_error(self.cpr, self.cpr_sem)}, "
            f"CMD {with_error(self.cmd, self.cmd_sem)}, {self.n_edges[-1]} edges)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per number of edges."""
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
def circuit_faithfulness(
    source: Source,
    circuit: pd.DataFrame | None = None,
    prompts: Prompts | None = None,
    *,
    corrupted: Prompts | None = None,
    nodes: str = "heads",
    sizes: Sequence[int] | None = None,
    task: TaskLike | None = None,
    n_prompts: int = N_EDGE_PAIRS,
    seed: int = 0,
) -> CircuitFaithfulness:
    """Faithfulness of a circuit and of its first edges, over their number.

    Between heads, what comes from the input and from MLPs and what goes to MLPs and to the output is always kept.

    Args:
        circuit: Edges to keep, the most important first: what `EdgeEffects.circuit(n)` gives, or such a table read from
            a CSV file. Columns "from" and "to", such as "L0H1" and "L2H3.v", and optionally "nodes". None means all edges,
            in the order of `attribute_edges` on the same prompts.
        prompts: Clean prompts, on which the circuit runs; None draws `n_prompts` with `seed`.
        corrupted: Corrupted prompts; None means the clean ones with other task vectors.
        nodes: Graph of a circuit without a column "nodes": "heads", or "all" for the whole model.
        sizes: Numbers of edges to keep; none, the whole circuit and the whole model are added. None means twelve, from
            one edge on.
        task: Law of drawn prompts; None means the model's own.
    Raises:
        ValueError: If the model is not one of this package, or has one layer; if the circuit is something else, names an
            edge that the model lacks, or names one twice; or a size is out of range.
    Source:
        Mueller et al. 2025, "MIB", arXiv 2504.13151 (faithfulness, CPR and CMD). Their graphs are those of nodes="all".
    See also:
        `attribute_edges`.
    Example:
        >>> from mechinterp import attribute_edges, load
        >>> checkpoint = load("sparse-h4-noise0.1-s0")
        >>> circuit = attribute_edges(checkpoint, n_prompts=8).circuit(24)
        >>> circuit_faithfulness(checkpoint, circuit, n_prompts=8, sizes=[6, 12]).n_edges.tolist()
        [0, 6, 12, 24, 288]
    """
    require_circuit(circuit)
    clean, corrupted = clean_and_corrupted(
        source,
        prompts,
        corrupted,
        analysis="circuit_faithfulness",
        task=task,
        n_prompts=n_prompts,
        seed=seed,
    )
    if circuit is None:
        circuit = attribute_edges(source, clean, corrupted=corrupted, nodes=nodes).circuit()
    pair = InputPair.of(
        predictor_of(source).hooked, clean, corrupted, nodes=graph_named(circuit, nodes)
    )
    order = edge_places(circuit, pair)
    return _kept_edges(pair, order, _counts(sizes, len(order), int(pair.edges.sum())))


def _kept_edges(
    pair: InputPair, order: Int[np.ndarray, "edge 2"], counts: Int[np.ndarray, " size"]
) -> CircuitFaithfulness:
    """Faithfulness of the first edges of an order, for several numbers of edges."""
    shown = progress(counts.tolist(), "keeping edges")
    metric = np.stack([_metric_of(pair, order, count) for count in shown], 1)
    gained = metric - metric[:, :1]
    faithfulness, faithfulness_sem = ratio_and_sem(gained, gained[:, -1])
    defined = len(order) == counts[-1] and np.isfinite(faithfulness).all()
    of_all = areas_and_sems(faithfulness, gained, counts) if defined else UNDEFINED
    distance, distance_sem = mean_and_sem(-metric)
    return CircuitFaithfulness(
        n_edges=counts,
        faithfulness=faithfulness,
        faithfulness_sem=faithfulness_sem,
        distance=distance,
        distance_sem=distance_sem,
        n_circuit=len(order),
        **of_all,
    )


def require_circuit(circuit: object) -> None:
    """Refuse anything but a table of edges or None.

    Raises:
        ValueError: If it is something else, has no row, or lacks the column "from" or "to".
    Example:
        >>> require_circuit(pd.DataFrame({"from": ["L0H1"]}))
        Traceback (most recent call last):
        ...
        ValueError: circuit must have a column to, got from.
    """
    if circuit is None:
        return
    if not isinstance(circuit, pd.DataFrame):
        instead = (
            "prompts are prompts=" if isinstance(circuit, Prompts) else "pass edges.circuit(n)"
        )
        raise ValueError(
            "circuit_faithfulness: circuit must be a DataFrame of edges, as attribute_edges(...).circuit(n) gives, "
            f"got {type(circuit).__name__}; {instead}."
        )
    if missing := [name for name in ("from", "to") if name not in circuit]:
        columns = ", ".join(map(str, circuit))
        raise ValueError(f"circuit must have a column {missing[0]}, got {columns}.")
    if circuit.empty:
        raise ValueError("circuit must name at least one edge, got a table without rows.")


def graph_named(circuit: pd.DataFrame, nodes: str) -> str:
    """Graph in the column "nodes" of a circuit, else the given one.

    Raises:
        ValueError: If the column has another value or several.
    Example:
        >>> graph_named(pd.DataFrame({"from": ["L0H1"], "to": ["L1H0.q"]}), "heads")
        'heads'
    """
    if "nodes" not in circuit:
        return nodes
    named = circuit["nodes"].unique().tolist()
    if len(named) != 1 or named[0] not in GRAPHS:
        raise ValueError(
            f"column nodes of circuit must be one of {', '.join(GRAPHS)} in all rows, got {named}."
        )
    return named[0]


def edge_places(circuit: pd.DataFrame, pair: InputPair) -> Int[np.ndarray, "edge 2"]:
    """Indices of the sender and the receiver of each edge of a circuit.

    Raises:
        ValueError: If the model has no such edge, or an edge occurs twice.
    """
    senders = {node.name: index for index, node in enumerate(pair.senders)}
    receivers = {node.name: index for index, node in enumerate(pair.receivers)}
    edges = pair.edges
    places: dict[tuple[int, int], None] = {}
    for one, two in zip(circuit["from"], circuit["to"], strict=True):
        place = senders.get(one, -1), receivers.get(two, -1)
        if min(place) < 0 or not edges[place]:
            nodes = "all" if "output" in receivers else "heads"
            raise ValueError(
                f"circuit must name some of the {edges.sum()} edges of the model (nodes={nodes!r}), "
                f"got {one} to {two}."
            )
        if place in places:
            raise ValueError(f"circuit must name each edge once, got {one} to {two} twice.")
        places[place] = None
    return np.array(list(places), dtype=int)


def _counts(sizes: Sequence[int] | None, n_circuit: int, n_edges: int) -> Int[np.ndarray, " size"]:
    """Numbers of edges to keep, from 0 to all edges of the model."""
    asked = np.geomspace(1, n_circuit, N_SIZES).round() if sizes is None else np.array(sizes)
    if asked.size and (asked.min() < 0 or asked.max() > n_circuit):
        raise ValueError(
            f"sizes must lie in 0 to {n_circuit}, the number of edges of the circuit, got {asked}."
        )
    return np.unique([0, n_circuit, n_edges, *asked]).astype(int)


def _metric_of(
    pair: InputPair, order: Int[np.ndarray, "edge 2"], count: int
) -> Float[np.ndarray, " prompt"]:
    """Metric with the first edges; more edges than the circuit has means all edges of the model."""
    kept = np.full(pair.edges.shape, count > len(order))
    kept[tuple(order[:count].T)] = True
    return pair.metric(circuit_output(pair, kept)).double().numpy(force=True)


def circuit_output(pair: InputPair, kept: Kept) -> Tensor:
    """Output of the model on the clean prompts if every edge that is not kept carries what its sender writes on the
    corrupted prompts.

    Raises:
        ValueError: If the model gives its receivers no copies of the stream.
    """
    model: Any = pair.hooked.model
    writing = hooks_of(pair.senders)
    _, cache = pair.hooked.run_noting(pair.corrupted, writing)
    corrupted = {name: written_at(model, name, cache[name]) for name in writing}
    cut = _CutEdges(model, corrupted, torch.from_numpy(~kept))
    hooks: list[tuple] = [(name, partial(cut.note, name=name)) for name in writing]
    for name, receivers in _readers(pair).items():
        hooks.append((name, partial(cut.shift, receivers=receivers)))
    with _own_inputs(model):
        return pair.hooked.run(pair.clean, hooks)


@dataclass(frozen=True, eq=False)
class _CutEdges:
    """Hooks of one run in which some edges carry the outputs of the corrupted prompts.

    A receiver reads the sum of what earlier senders write. For each of its cut edges the corrupted output minus the
    current one is added to that sum.
    """

    model: Any
    corrupted: dict[str, Float[Tensor, "batch pos written d_model"]]
    """Outputs of the senders on the corrupted prompts, by hook."""
    cut: Bool[Tensor, "sender receiver"]
    """True for the edges that are not kept."""
    changes: list[Float[Tensor, "batch pos written d_model"]] = field(default_factory=list)
    """Corrupted minus current output of the senders that have run, in their order."""

    def note(self, values: Tensor, hook: object, *, name: str) -> None:
        """Hook on what senders write."""
        self.changes.append(self.corrupted[name] - written_at(self.model, name, values))

    def shift(self, own: Tensor, hook: object, *, receivers: list[int]) -> Tensor:
        """Hook on the copies of the stream that some receivers read."""
        if not self.changes:
            return own
        change = torch.cat(self.changes, dim=2)
        cut = self.cut[: change.shape[2], receivers].to(own)
        shift = einsum(change, cut, "batch pos sender d, sender reader -> batch pos reader d")
        return own + (shift if own.ndim == 4 else shift[:, :, 0])


def _readers(pair: InputPair) -> dict[str, list[int]]:
    """Receivers by the hook on their copies of the stream.

    Raises:
        ValueError: If the model has no such hook.
    """
    model: Any = pair.hooked.model
    readers = defaultdict(list)
    for index, node in enumerate(pair.receivers):
        if node.own_input not in model.hook_dict:
            raise ValueError(
                f"circuits of edges need a model with the hook {node.own_input}, got {class_name(model)} without it."
            )
        readers[node.own_input].append(index)
    return readers


@contextmanager
def _own_inputs(model: Any) -> Iterator[None]:
    """Model whose receivers read copies of the stream of their own."""
    before = {name: getattr(model.cfg, name) for name in SPLIT_INPUTS}
    try:
        for name in SPLIT_INPUTS:
            getattr(model, f"set_{name}")(True)
        yield
    finally:
        for name, value in before.items():
            getattr(model, f"set_{name}")(value)


def areas_and_sems(
    faithfulness: Float[np.ndarray, " size"],
    gained: Float[np.ndarray, "prompt size"],
    counts: Int[np.ndarray, " size"],
) -> dict[str, float]:
    """CPR and CMD with their bootstrap standard errors over prompts.

    Args:
        gained: Metric of each prompt minus that without edges.
    """
    cpr, cmd = areas(faithfulness, counts)
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # NaN if the metric of a sample does not change
        again = [areas(mean / mean[-1], counts) for mean in resampled(len(gained)) @ gained]
        cpr_sem, cmd_sem = np.std(again, axis=0, ddof=1).tolist()
    return {"cpr": cpr, "cpr_sem": cpr_sem, "cmd": cmd, "cmd_sem": cmd_sem}


def areas(
    faithfulness: Float[np.ndarray, " size"], counts: Int[np.ndarray, " size"]
) -> tuple[float, float]:
    """Areas under f and under |1 - f| over the share of edges kept.

    Example:
        >>> areas(np.array([0, 0.25, 1]), np.array([0, 1, 4]))
        (0.5, 0.5)
    """
    share = counts / counts[-1]
    away = np.abs(1 - faithfulness)
    return float(np.trapezoid(faithfulness, share)), float(np.trapezoid(away, share))
