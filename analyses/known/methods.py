"""Attribution methods and the package's labels, scored on the suite of known answers.

Effects and estimates are on the pairs of prompts of each entry. A ranking of heads alone ranks an edge by the smaller of
its two heads' importances.
Run: python -m analyses known/methods (five minutes; --quick: three hand-made models)"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch

from analyses.lib import Measured
from mechinterp import ablate, classify, name_algorithm
from mechinterp.analysis.patching.edges import estimated_effects
from mechinterp.analysis.patching.pairing import InputPair
from mechinterp.known import Entry, Suite, score, suite
from mechinterp.known.entries import edge_place
from mechinterp.models.hooked.masks import pattern_name, z_name

Answer = dict[str, object]


def pair_of(entry: Entry) -> InputPair:
    return InputPair.of(entry.checkpoint.predictor.hooked, *entry.pairs, nodes="all")


def attribution(entry: Entry, *, steps: int) -> Answer:
    """Attribution patching (one step: the gradient at the corrupted prompts) or integrated gradients."""
    pair = pair_of(entry)
    answer: Answer = {"heads": head_attribution(pair, steps)}
    if pair.hooked.n_layers > 1:
        with torch.inference_mode(False):
            estimates = estimated_effects(pair, steps).mean(0)
        senders, receivers = (
            {node.name: index for index, node in enumerate(each)}
            for each in (pair.senders, pair.receivers)
        )
        answer["edges"] = entry.edges().assign(
            value=lambda frame: estimates[frame["from"].map(senders), frame["to"].map(receivers)]
        )
    return answer


def head_attribution(pair: InputPair, steps: int) -> np.ndarray:
    """First-order effect of each head's weighted averages, mean over prompts."""
    hooked, names = pair.hooked, [z_name(layer) for layer in range(pair.hooked.n_layers)]
    with torch.no_grad():
        clean, corrupted = (hooked.run_noting(t, names)[1] for t in (pair.clean, pair.corrupted))
    shares = [0.0] if steps == 1 else [(k + 0.5) / steps for k in range(steps)]
    totals = [torch.zeros(())] * len(names)
    for share in shares:
        tokens = torch.lerp(pair.corrupted, pair.clean, share).detach().requires_grad_()
        output, passed = hooked.run_noting(tokens, names)
        gradients = torch.autograd.grad(pair.metric(output).sum(), [passed[n] for n in names])
        totals = [total + g / steps for total, g in zip(totals, gradients, strict=True)]
    effects = [
        ((clean[name] - corrupted[name]) * gradient).sum((1, 3)).mean(0)
        for name, gradient in zip(names, totals, strict=True)
    ]
    return torch.stack(effects).numpy(force=True)


def ablation(entry: Entry, *, method: str) -> Answer:
    """Rise of the squared error when a head is masked."""
    found = ablate(entry.checkpoint, entry.pairs[0], what="heads", method=method)
    return by_heads(entry, found.rise)


def attention_weight(entry: Entry) -> Answer:
    """Largest absolute attention weight of the query, mean over prompts."""
    hooked = entry.checkpoint.predictor.hooked
    names = [pattern_name(layer) for layer in range(hooked.n_layers)]
    with torch.no_grad():
        _, passed = hooked.run_noting(hooked.inputs(entry.pairs[0]), names)
    largest = [passed[name][:, :, -1].abs().amax(-1).mean(0) for name in names]
    return by_heads(entry, torch.stack(largest).numpy())


def by_heads(entry: Entry, importance: np.ndarray) -> Answer:
    answer: Answer = {"heads": importance}
    if len(importance) > 1:
        answer["edges"] = edge_frame(
            entry, lambda at: min(importance[at[1], at[2]], importance[at[3], at[4]])
        )
    return answer


def edge_frame(entry: Entry, value: Callable[[tuple[int, ...]], float]) -> pd.DataFrame:
    """`entry.edges()` with values, a function of [input, layer, head, later_layer, later_head]."""
    frame = entry.edges()
    return frame.assign(value=[value(edge_place(*edge)) for edge in frame.to_numpy()])


def random_order(entry: Entry, *, seed: int) -> Answer:
    model = entry.checkpoint.config.model
    rng = np.random.default_rng([seed, *entry.name.encode()])
    answer: Answer = {"heads": rng.random((model.n_layers, model.n_heads))}
    if model.n_layers > 1:
        answer["edges"] = entry.edges().assign(value=lambda frame: rng.random(len(frame)))
    return answer


def patches(entry: Entry, *, known: Suite) -> Answer:
    """The effects themselves."""
    truth = known[entry.name].truth
    answer: Answer = {"heads": truth.heads.value}
    if truth.edges is not None:
        answer["edges"] = edge_frame(entry, lambda at: truth.edges.value[at])
    return answer


def label(entry: Entry) -> Answer:
    """The label of this package."""
    model = entry.checkpoint
    one = model.config.model.one_attention
    return {"label": classify(model).label if one else name_algorithm(model).label}


def components(entry: Entry) -> Answer:
    """Singular vectors of the QK and OV circuits of every head."""
    weights, found = entry.checkpoint.weights, []
    for circuit in (weights.W_Q @ weights.W_K.mT, weights.W_V @ weights.W_O):
        left, values, right = torch.linalg.svd(circuit)
        alive = values > 1e-6 * values.amax()
        found += [left.mT[alive], right[alive]]
    return {"components": torch.cat(found).numpy()}


def rows_of(known: Suite) -> pd.DataFrame:
    methods: dict[str, Callable[[Entry], Answer]] = {
        "attribution patching": partial(attribution, steps=1),
        "integrated gradients, 5": partial(attribution, steps=5),
        "integrated gradients, 20": partial(attribution, steps=20),
        "zero ablation": partial(ablation, method="zero"),
        "mean ablation": partial(ablation, method="mean"),
        "attention weight": attention_weight,
        "effects": partial(patches, known=known),
        **{f"random {seed}": partial(random_order, seed=seed) for seed in range(5)},
        "label of this package": label,
        "singular vectors": components,
    }
    parts = []
    for name, method in methods.items():
        half = known
        if method in (label, components):
            made = {n: e for n, e in known.items() if e.kind == "hand-made"}
            half = Suite(known.version, made)
        found = score(method, half)
        frame = found.to_frame().assign(
            method=name.removesuffix(name[-2:]) if "random" in name else name
        )
        parts.append(frame.assign(seconds=frame["entry"].map(found.seconds)))
    return pd.concat(parts, ignore_index=True)


def measure(quick: bool) -> Measured:
    known = suite(trained="none" if quick else "all")
    if quick:
        known = Suite(1, {name: known[name] for name in ("gd-2", "preconditioned-2", "minimum-2")})
    return Measured(rows_of(known))
