"""Attribution of edges and heads by gradients: attribution patching in both directions, integrated gradients, EAP-IG.

With w_u what node u writes, r_v the stream that node v reads, m minus the squared distance to the prediction on the clean
prompts and f the prediction, an edge's score is, summed over positions and averaged over prompts,
- attribution patching in: (w_u(clean) - w_u(corrupted)) . dm/dr_v at the corrupted prompts;
- attribution patching out: the square of (w_u(clean) - w_u(corrupted)) . df/dr_v at the clean prompts, where dm/dr_v is 0;
- integrated gradients: as in, with the gradient averaged over points between both prompts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import einsum
from torch import Tensor

from mechinterp.analysis.patching.circuit import SPLIT_INPUTS
from mechinterp.analysis.patching.pairing import InputPair
from mechinterp.known import Entry
from mechinterp.models.hooked.masks import z_name

Answer = dict[str, Any]
Of = Callable[[Tensor], Tensor]
"""Function from the output of a model to one number per prompt."""
PAPER_STEPS = 5
"""Number of points of EAP-IG in its paper (Hanna et al. 2024) and in MIB."""
FINE_STEPS = 20
"""Number of points of plain integrated gradients."""


def pair_of(entry: Entry) -> InputPair:
    return InputPair.of(entry.checkpoint.predictor.hooked, *entry.pairs, nodes="all")


def patching_in(entry: Entry) -> Answer:
    """Attribution patching into the corrupted run."""
    pair = pair_of(entry)
    return {"aim": "in", **answer(pair, [Gradients(pair, pair.corrupted, pair.metric)])}


def patching_out(entry: Entry) -> Answer:
    """Attribution patching out of the clean run: mean square of the first-order change of the prediction."""
    pair, totals = pair_of(entry), dict[str, np.ndarray]()
    for entry_of_y in range(entry.task.d_y):
        of = partial(predicted, pair, at=entry_of_y)
        for name, change in Gradients(pair, pair.clean, of).changes().items():
            totals[name] = totals.get(name, 0) + change**2
    return {"aim": "out", **{name: each.mean(0) for name, each in totals.items()}}


def integrated(entry: Entry) -> Answer:
    """Integrated gradients by the midpoint rule, which are the same in both directions."""
    pair = pair_of(entry)
    shares = [(k + 0.5) / FINE_STEPS for k in range(FINE_STEPS)]
    return answer(pair, along(pair, shares))


def eap_ig_inputs(entry: Entry) -> Answer:
    """EAP-IG of the inputs: points k / m from the corrupted to the clean prompts, k = 1..m."""
    pair = pair_of(entry)
    shares = [k / PAPER_STEPS for k in range(1, PAPER_STEPS + 1)]
    return {"aim": "out", **answer(pair, along(pair, shares))}


def eap_ig_activations(entry: Entry) -> Answer:
    """EAP-IG of the activations: on the clean prompts, the outputs of one layer's heads, of one MLP or of the input lie at
    k / m between both prompts; the mean is over all of them."""
    pair = pair_of(entry)
    names = list(dict.fromkeys(node.hook for node in pair.senders))
    with torch.no_grad():
        clean, corrupted = (
            pair.hooked.run_noting(tokens, names)[1] for tokens in (pair.clean, pair.corrupted)
        )
    steps = [k / PAPER_STEPS for k in range(1, PAPER_STEPS + 1)]
    points = (
        Gradients(
            pair,
            pair.clean,
            pair.metric,
            [(name, partial(lerped, corrupted[name], clean[name], s))],
        )
        for name in names
        for s in steps
    )
    return {"aim": "out", **answer(pair, points)}


def lerped(start: Tensor, end: Tensor, share: float, own: Tensor, hook: object) -> Tensor:
    # The own values times 0 keep the graph of gradients of what comes before.
    return torch.lerp(start, end, share) + 0 * own


def predicted(pair: InputPair, output: Tensor, *, at: int) -> Tensor:
    return pair.hooked.read(output)[:, at]


def along(pair: InputPair, shares: Sequence[float]) -> Iterator["Gradients"]:
    """Gradients of the metric between the corrupted prompts (share 0) and the clean ones (share 1)."""
    for share in shares:
        yield Gradients(pair, torch.lerp(pair.corrupted, pair.clean, share), pair.metric)


def answer(pair: InputPair, points: "Iterator[Gradients] | Sequence[Gradients]") -> Answer:
    """First-order effects of edges and heads by the mean gradient over points, mean over prompts."""
    totals, count = dict[str, np.ndarray](), 0
    for point in points:
        count += 1
        for name, change in point.changes().items():
            totals[name] = totals.get(name, 0) + change.mean(0)
    return {name: total / count for name, total in totals.items()}


class Gradients:
    """Gradients at what each receiver reads and at the weighted averages z of all heads."""

    def __init__(
        self, pair: InputPair, tokens: Tensor, of: Of, hooks: Sequence[tuple] = ()
    ) -> None:
        model: Any = pair.hooked.model
        self.pair = pair
        heads = [z_name(layer) for layer in range(pair.hooked.n_layers)]
        names = list(dict.fromkeys([*(node.own_input for node in pair.receivers), *heads]))
        with own_inputs(model), torch.enable_grad():
            tokens = tokens.detach().clone().requires_grad_()
            output, passed = pair.hooked.run_noting(tokens, names, hooks)
            found = torch.autograd.grad(
                of(output).sum(), [passed[name] for name in names], materialize_grads=True
            )
        at = dict(zip(names, found, strict=True))
        read = [
            at[n.own_input] if n.head is None else at[n.own_input][:, :, n.head]
            for n in pair.receivers
        ]
        self.at_edges, self.at_heads = torch.stack(read, 2), [at[name] for name in heads]

    def changes(self) -> dict[str, np.ndarray]:
        """First-order effect of each edge [prompt, edge] and of each head [prompt, layer, head]."""
        edges = einsum(self.pair.moved, self.at_edges, "n pos u d, n pos v d -> n u v")
        heads = [
            (moved * gradient).sum((1, 3))
            for moved, gradient in zip(moved_heads(self.pair), self.at_heads, strict=True)
        ]
        return {
            "edges": edges[:, torch.from_numpy(self.pair.edges)].numpy(force=True),
            "heads": torch.stack(heads, 1).numpy(force=True),
        }


@torch.no_grad()
def moved_heads(pair: InputPair) -> list[Tensor]:
    """z of each layer on the clean prompts minus that on the corrupted prompts."""
    names = [z_name(layer) for layer in range(pair.hooked.n_layers)]
    clean, corrupted = (
        pair.hooked.run_noting(tokens, names)[1] for tokens in (pair.clean, pair.corrupted)
    )
    return [clean[name] - corrupted[name] for name in names]


@contextmanager
def own_inputs(model: Any) -> Iterator[None]:
    """Model whose receivers read copies of the stream of their own."""
    for name in SPLIT_INPUTS:
        getattr(model, f"set_{name}")(True)
    try:
        yield
    finally:
        for name in SPLIT_INPUTS:
            getattr(model, f"set_{name}")(False)


def as_frames(method: Callable[[Entry], Answer], entry: Entry) -> Answer:
    """Answer of a method with its edges as the frame `entry.edges()`."""
    found = method(entry)
    if "edges" in found:
        found["edges"] = entry.edges().assign(value=found["edges"])
    return found
