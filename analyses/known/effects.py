"""Effects of edges, heads and sets of heads, each by two programs: hooks on the model, and the plain model in numpy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import factorial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analyses.known.gradients import own_inputs
from analyses.known.plain import Plain
from mechinterp.analysis.patching.graph import Node, layer_of
from mechinterp.analysis.patching.pairing import InputPair
from mechinterp.known import Entry
from mechinterp.known.truth import KINDS, MOST_SUBSETS
from mechinterp.models.hooked.masks import resid_name, z_name

CHUNK = 16
"""Number of interventions that the plain model runs side by side."""
Computed = tuple[np.ndarray, float]
"""A value and the largest difference between the two programs."""


def pair_of(entry: Entry) -> InputPair:
    return InputPair.of(entry.checkpoint.predictor.hooked, *entry.pairs, nodes="all")


def all_effects(entry: Entry) -> dict[str, Computed]:
    """Effects of single edges, single heads and Shapley values; of all sets of heads if there are at most 12."""
    hooked, plain = by_hooks(entry), by_plain_model(entry)
    assert hooked.keys() == plain.keys()
    return {
        name: (value, float(np.abs(value - plain[name]).max())) for name, value in hooked.items()
    }


def by_hooks(entry: Entry) -> dict[str, np.ndarray]:
    """All effects by hooks on the model."""
    pair = pair_of(entry)
    found = {f"edges_{kind}": edges_by_hooks(pair, kind) for kind in KINDS[:2]}
    for kind in KINDS:
        runs = Masks.of(pair, kind)
        found |= _of_heads(kind, pair.hooked.n_layers, pair.hooked.n_heads, runs.effects)
        shapley = found.get(f"shapley_{kind}")
        if shapley is not None:
            found[f"shapley_{kind}"] = shapley_of_subsets(shapley).reshape(pair.hooked.n_layers, -1)
    return found


def by_plain_model(entry: Entry) -> dict[str, np.ndarray]:
    """All effects by the plain model."""
    runs = PlainRuns.of(entry)
    found = {
        f"edges_{kind}": runs.edges(entry.edges().to_numpy().tolist(), kind) for kind in KINDS[:2]
    }
    n_layers, n_heads = runs.plain.model.n_layers, runs.plain.model.n_heads
    for kind in KINDS:
        found |= _of_heads(kind, n_layers, n_heads, partial(runs.heads, kind=kind))
        shapley = found.get(f"shapley_{kind}")
        if shapley is not None:
            found[f"shapley_{kind}"] = shapley_of_dividends(shapley).reshape(n_layers, -1)
    return found


def _of_heads(kind: str, n_layers: int, n_heads: int, effects: Any) -> dict[str, np.ndarray]:
    """Effects of single heads; for few heads those of all sets, too, also as the game of the Shapley values."""
    n = n_layers * n_heads
    if n > MOST_SUBSETS:
        return {f"heads_{kind}": effects([[i] for i in range(n)]).reshape(n_layers, n_heads)}
    every = effects(subsets(n))
    single = every[2 ** np.arange(n)].reshape(n_layers, n_heads)
    found = {f"heads_{kind}": single, f"shapley_{kind}": every}
    return found | ({f"subsets_{kind}": every} if kind in KINDS[:2] else {})


def subsets(n: int) -> list[list[int]]:
    """All sets of n things, at the index whose bits name them.

    Example:
        >>> subsets(2)
        [[], [0], [1], [0, 1]]
    """
    return [[i for i in range(n) if index >> i & 1] for index in range(2**n)]


# By hooks


@torch.no_grad()
def edges_by_hooks(pair: InputPair, kind: str) -> np.ndarray:
    """Effect of each edge: one receiver reads a stream in which one sender's output is that on the other prompts."""
    hooked: Any = pair.hooked.model
    tokens, sign = (pair.corrupted, 1) if kind == "in" else (pair.clean, -1)
    names = [resid_name(layer) for layer in range(pair.hooked.n_layers)]
    output, streams = pair.hooked.run_noting(tokens, names)
    before, effects = pair.metric(output), []
    with own_inputs(hooked):
        for sender, receiver in np.argwhere(pair.edges):
            node = pair.receivers[receiver]
            hook = partial(_read, node=node, more=sign * pair.moved[:, :, sender])
            # Nothing changes before the layer that reads.
            layer = layer_of(node.own_input)
            after = hooked.run_with_hooks(
                streams[names[layer]], start_at_layer=layer, fwd_hooks=[(node.own_input, hook)]
            )
            effects.append((pair.metric(after) - before).mean().item())
    return np.array(effects)


def _read(own: Tensor, hook: object, *, node: Node, more: Tensor) -> Tensor:
    own = own.clone()
    if node.head is None:
        return own + more
    own[:, :, node.head] += more
    return own


@dataclass(frozen=True, eq=False)
class Masks:
    """Runs in which some heads have other weighted averages z."""

    pair: InputPair
    tokens: Tensor
    values: Sequence[Tensor]
    """z of each layer that replaces the own one."""

    @classmethod
    @torch.no_grad()
    def of(cls, pair: InputPair, kind: str) -> "Masks":
        names = [z_name(layer) for layer in range(pair.hooked.n_layers)]
        clean, corrupted = (
            [pair.hooked.run_noting(tokens, names)[1][name] for name in names]
            for tokens in (pair.clean, pair.corrupted)
        )
        values = {
            "in": clean,
            "out": corrupted,
            "zero": [torch.zeros_like(z) for z in clean],
            "mean": [z.mean(0, keepdim=True).expand_as(z) for z in clean],
            "resample": [z.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) for z in clean],
        }[kind]
        return cls(pair, pair.corrupted if kind == "in" else pair.clean, values)

    @torch.no_grad()
    def effects(self, sets: Sequence[Sequence[int]]) -> np.ndarray:
        """Effect of each set of heads; some sets run side by side, each on a copy of the prompts."""
        hooked: Any = self.pair.hooked.model
        before, n_prompts = self.pair.metric(hooked(self.tokens)).mean(), len(self.tokens)
        effects = []
        for start in range(0, len(sets), CHUNK):
            some = sets[start : start + CHUNK]
            tokens = self.tokens.repeat(len(some), 1, 1)
            output = hooked.run_with_hooks(tokens, fwd_hooks=self._hooks(some))
            effects += [
                (self.pair.metric(own).mean() - before).item() for own in output.split(n_prompts)
            ]
        return np.array(effects)

    def _hooks(self, sets: Sequence[Sequence[int]]) -> list[tuple]:
        hooked = self.pair.hooked
        replaced = torch.zeros(len(sets), hooked.n_layers, hooked.n_heads, dtype=torch.bool)
        for number, heads in enumerate(sets):
            for head in heads:
                replaced[(number, *divmod(head, hooked.n_heads))] = True
        every = replaced.repeat_interleave(len(self.tokens), 0)
        return [
            (z_name(n), partial(_with_heads, replaced=every[:, n], values=self.values[n]))
            for n in range(hooked.n_layers)
        ]


def _with_heads(z: Tensor, hook: object, *, replaced: Tensor, values: Tensor) -> Tensor:
    copies = values.repeat(len(z) // len(values), 1, 1, 1)
    return torch.where(replaced[:, None, :, None], copies, z)


def shapley_of_subsets(game: np.ndarray) -> np.ndarray:
    """Shapley values by the sum over all sets without a player of what the player adds.

    Example:
        >>> shapley_of_subsets(np.array([0.0, 1.0, 2.0, 5.0]))
        array([2., 3.])
    """
    n = len(game).bit_length() - 1
    values = np.zeros(n)
    for player in range(n):
        others = [i for i in range(n) if i != player]
        for size in range(n):
            weight = factorial(size) * factorial(n - size - 1) / factorial(n)
            at = [sum(1 << i for i in chosen) for chosen in combinations(others, size)]
            values[player] += weight * (game[np.array(at) | 1 << player] - game[at]).sum()
    return values


# By the plain model


@dataclass(frozen=True, eq=False)
class PlainRuns:
    """The plain model with its tokens, and what every node writes on both kinds of prompts."""

    plain: Plain
    tokens: dict[str, np.ndarray]
    written: dict[str, dict[str, np.ndarray]]
    target: np.ndarray

    @classmethod
    def of(cls, entry: Entry) -> "PlainRuns":
        plain, hooked = Plain(entry.checkpoint.weights), entry.hooked
        tokens = {
            kind: hooked.tokens(prompts).double().numpy()
            for kind, prompts in zip(("clean", "corrupted"), entry.pairs, strict=True)
        }
        runs = {kind: plain.run(each) for kind, each in tokens.items()}
        written = {kind: run[1] for kind, run in runs.items()}
        return cls(plain, tokens, written, runs["clean"][0])

    def metric(self, prediction: np.ndarray) -> np.ndarray:
        """Metric of each intervention, mean over prompts."""
        return -((prediction - self.target) ** 2).sum(-1).mean(-1)

    def edges(self, edges: Sequence[tuple[str, str]], kind: str) -> np.ndarray:
        """Effect of each edge."""
        base, other = ("corrupted", "clean") if kind == "in" else ("clean", "corrupted")
        tokens, found = self.tokens[base][None], []
        # Edges with one reader run side by side, so that what comes before it is computed once.
        order = sorted(range(len(edges)), key=lambda index: edges[index][1])
        for start in range(0, len(edges), CHUNK):
            some = [edges[index] for index in order[start : start + CHUNK]]

            def read(name: str, stream: np.ndarray, some: Any = some) -> np.ndarray:
                changed = [i for i, (_, receiver) in enumerate(some) if receiver == name]
                if not changed:
                    return stream
                stream = np.broadcast_to(stream, (len(some), *stream.shape[1:])).copy()
                for i in changed:
                    sender = some[i][0]
                    stream[i] += self.written[other][sender] - self.written[base][sender]
                return stream

            found.append(self.metric(self.plain.run(tokens, read=read)[0]))
        effects = np.empty(len(edges))
        effects[order] = np.concatenate(found)
        return effects - self.metric(self.plain.run(tokens)[0])

    def heads(self, sets: Sequence[Sequence[int]], kind: str) -> np.ndarray:
        """Effect of each set of heads."""
        base = "corrupted" if kind == "in" else "clean"
        tokens, n_heads = self.tokens[base][None], self.plain.model.n_heads
        found = []
        for start in range(0, len(sets), CHUNK):
            some = [
                {"L{}H{}".format(*divmod(i, n_heads)) for i in each}
                for each in sets[start : start + CHUNK]
            ]

            def write(name: str, output: np.ndarray, some: Any = some) -> np.ndarray:
                changed = [i for i, names in enumerate(some) if name in names]
                if not changed:
                    return output
                output = np.broadcast_to(output, (len(some), *output.shape[1:])).copy()
                output[changed] = self._other(name, kind)
                return output

            found.append(
                np.broadcast_to(self.metric(self.plain.run(tokens, write=write)[0]), len(some))
            )
        return np.concatenate(found) - self.metric(self.plain.run(tokens)[0])

    def _other(self, name: str, kind: str) -> np.ndarray:
        """Output of a head that replaces its own."""
        clean = self.written["clean"][name]
        if kind == "resample":
            return clean[np.arange(len(clean)) ^ 1]
        if kind == "mean":
            return np.broadcast_to(clean.mean(0), clean.shape)
        if kind == "zero":
            return np.zeros_like(clean)
        return clean if kind == "in" else self.written["corrupted"][name]


def shapley_of_dividends(game: np.ndarray) -> np.ndarray:
    """Shapley values by dividends: what a set adds to all its parts is divided equally among its members.

    Example:
        >>> shapley_of_dividends(np.array([0.0, 1.0, 2.0, 5.0]))
        array([2., 3.])
    """
    n = len(game).bit_length() - 1
    dividends = np.array(game, dtype=float)
    indices = np.arange(len(game))
    for player in range(n):
        members = indices[indices >> player & 1 == 1]
        dividends[members] -= dividends[members ^ (1 << player)]
    sizes = np.array([bin(i).count("1") for i in indices])
    each = dividends / np.maximum(sizes, 1)
    return np.array([each[indices >> player & 1 == 1].sum() for player in range(n)])
