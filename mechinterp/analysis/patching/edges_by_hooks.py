"""Effects of edges by runs of a hooked model: gradients at what each receiver reads, and one run for each edge."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.ablation.measured import Metric
from mechinterp.analysis.patching.graph import Node, layer_of
from mechinterp.analysis.patching.pairing import InputPair, shares_of
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.gradients import require_gradients
from mechinterp.models.hooked.masks import require_sum, resid_name
from mechinterp.models.hooked.query_position import query_positions
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.progress import progress

PROMPTS_AT_ONCE = 256
"""Number of prompts that run side by side: several edges into one layer are patched together up to this number."""


def checked_pair(
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


def by_hooks(
    pair: InputPair, ig_steps: int
) -> tuple[
    Float[np.ndarray, "prompt sender receiver"], Float[np.ndarray, "prompt sender receiver"]
]:
    """Estimated and patched effects for each prompt; NaN where there is no edge."""
    return estimated_effects(pair, ig_steps), _patches(pair)


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
    for share in shares_of(ig_steps):
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
