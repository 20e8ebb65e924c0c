"""Methods of other libraries by adapters of a few lines, for environments that have them (`make test-peers`)."""

import re

import numpy as np
import torch
from torch import Tensor

from analyses.known.alignment import STEPS, Interchanges, first_rotation, train
from analyses.known.gradients import FINE_STEPS, Answer, moved_heads, own_inputs, pair_of
from mechinterp.known import Entry
from mechinterp.known.variables import Variable
from mechinterp.models.hooked.masks import z_name


def captum_integrated(entry: Entry, *, steps: int = FINE_STEPS) -> Answer:
    """Integrated gradients of heads by captum: its internal influence of z, the mean gradient along the path, times the
    change of z."""
    from captum.attr import InternalInfluence

    pair = pair_of(entry)
    model, read = pair.hooked.model, pair.hooked.read

    def closeness(tokens: Tensor, target: Tensor) -> Tensor:
        return -(read(model(tokens)) - target).square().sum(-1)

    with torch.no_grad():
        target = read(model(pair.clean))
    heads = []
    for block, moved in zip(model.blocks, moved_heads(pair), strict=True):
        influence = InternalInfluence(closeness, block.attn.hook_z)
        mean = influence.attribute(
            pair.clean,
            baselines=pair.corrupted,
            additional_forward_args=target,
            n_steps=steps,
            method="riemann_middle",
        )
        heads.append((mean * moved).sum((1, 3)).mean(0).numpy(force=True))
    return {"heads": np.stack(heads)}


def nnsight_patching_in(entry: Entry) -> Answer:
    """Attribution patching of edges (EAP) and heads by nnsight, which traces what every node writes and the gradient at what
    every node reads."""
    import nnsight

    pair = pair_of(entry)
    model, read = pair.hooked.model, pair.hooked.read
    wanted = {n.hook for n in pair.senders} | {n.own_input for n in pair.receivers}
    wanted |= {z_name(layer) for layer in range(pair.hooked.n_layers)}
    with own_inputs(model):
        # nnsight asks for hook points in the order in which the model runs them.
        names = [name for name in model.run_with_cache(pair.clean)[1] if name in wanted]
        traced = nnsight.NNsight(model)
        with torch.no_grad(), traced.trace(pair.clean):
            clean = nnsight.save([traced.get(name).output for name in names])
            target = traced.output.save()
        with traced.trace(pair.corrupted):
            at = [traced.get(name).output.requires_grad_() for name in names]
            corrupted = nnsight.save([each.detach() for each in at])
            closeness = -(read(traced.output) - read(target)).square().sum()
            with closeness.backward():
                gradients = nnsight.save([each.grad for each in reversed(at)])
    moved = {n: one - other for n, one, other in zip(names, clean, corrupted, strict=True)}
    slopes = dict(zip(names, reversed(gradients), strict=True))
    written, slope = [], []
    for node in pair.senders:
        part = moved[node.hook]
        if node.head is not None:
            W_O = model.blocks[int(re.findall(r"\d+", node.name)[0])].attn.W_O
            part = part[:, :, node.head] @ W_O[node.head]
        written.append(part)
    for node in pair.receivers:
        part = slopes[node.own_input]
        slope.append(part if node.head is None else part[:, :, node.head])
    edges = [(written[u] * slope[v]).sum((1, 2)).mean() for u, v in np.argwhere(pair.edges)]
    heads = [moved[name] * slopes[name] for name in map(z_name, range(pair.hooked.n_layers))]
    return {
        "edges": torch.stack(edges).numpy(force=True),
        "heads": torch.stack([each.sum((1, 3)).mean(0) for each in heads]).numpy(force=True),
    }


def pyvene_alignment(entry: Entry, *, seed: int = 0, steps: int = STEPS) -> Answer:
    """Distributed alignment by pyvene, its authors' library, for variables in the stream: its model, its intervention and
    its rotation, which starts where `alignment` starts and is trained with the same steps."""
    found = {v.name: _pyvene_basis(entry, v, seed, steps) for v in entry.variables}
    return {"subspace": found}


def _pyvene_basis(entry: Entry, variable: Variable, seed: int, steps: int) -> np.ndarray:
    from pyvene import IntervenableModel, LowRankRotatedSpaceIntervention

    data, hooked = Interchanges.of(entry, variable, seed), entry.hooked
    first = first_rotation(data, seed)
    intervention = LowRankRotatedSpaceIntervention(
        embed_dim=first.weight.shape[1], low_rank_dimension=variable.size, keep_last_dim=True
    ).double()
    intervention.rotate_layer.weight = first.weight.detach().mT
    # PyTorch completes both to a square matrix at random.
    own, other = (
        each.parametrizations.weight[0].base for each in (intervention.rotate_layer, first)
    )
    own.copy_(other)
    # pyvene reads these two of every model.
    hooked.config, hooked.device = hooked.cfg, data.base.device
    path = re.sub(r"\.(\d+)", r"[\1]", variable.hook)
    place = {"component": f"{path}.output", "unit": "pos", "intervention": intervention}
    model = IntervenableModel(place, model=hooked)
    n_pos = data.base.shape[1]
    at_pos = list(range(n_pos)) if variable.at is None else variable.at % n_pos

    def predicted(at: Tensor) -> Tensor:
        rows = [[at_pos] * len(at)] if isinstance(at_pos, list) else at_pos
        _, output = model(
            {"input": data.base[at]},
            [{"input": data.source[at]}],
            unit_locations={"sources->base": (rows, rows)},
        )
        return output[:, -1]

    train(intervention, predicted, data.target, seed=seed, steps=steps)
    return intervention.rotate_layer.weight.detach().mT.numpy()
