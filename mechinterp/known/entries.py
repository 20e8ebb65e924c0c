"""The suite: models with known answers, and what is known about each.

Folder `suite_1` has the hand-made models and truths.json, whose hash names the version. Trained models are the shipped
ones; truths.json has the hash of each file of weights."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.patching.pairing import COMPONENTS, clean_and_corrupted
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.shipped import BUNDLED, CLONE
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.theory.linear import Heads
from mechinterp.training.linear import task_moments

FOLDER = Path(__file__).parent / "suite_1"
TRUTHS = "truths.json"
HASHES = {1: "625d98716b10cab7d13d302fc2a582cbfdcf9f65ce26ad129d7af827e3ea098b"}
"""SHA-256 of truths.json of each version."""
TRAINED = ("bundled", "all", "none")
N_PAIRS = 32
"""Number of pairs of prompts on which effects of heads and edges are computed."""


@dataclass(frozen=True, eq=False)
class Known:
    """A known answer."""

    value: Any
    how: str
    """"proved", "computed exactly" or "by construction"."""
    error: float = 0.0
    """Largest difference between two ways of computing the value, in its unit; 0 if nothing was computed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Truth:
    """Known answers about a model; None where an answer is not known."""

    edges: Known | None = None
    """Effect of each edge between two heads, patched alone, in y^2: an array [input, layer, head, later_layer,
    later_head]; NaN where there is no edge."""
    heads: Known | None = None
    """Effect of each head, patched alone, in y^2: an array [layer, head]."""
    shapley: Known | None = None
    """Shapley value of each head of one layer for the excess risk, in y^2: an array [layer, head]."""
    algorithm: Known | None = None
    """Label, as `name_algorithm` and `classify` give it."""
    learning_coefficient: Known | None = None
    """Local learning coefficient of `Entry.module` for `Entry.loss`."""
    components: Known | None = None
    """Unit vectors of the stream that heads read or write one by one: an array [component, d_model]; signs and order
    have no meaning."""


NAMES = tuple(each.name for each in fields(Truth))


class LinearHeads(nn.Module):
    """Linear attention with its trained entries alone as parameters: y_hat = b^T M x_query, b = X^T y / L.

    Parameters are v [head], K and Q [head, rank, d_x], or U [head, d_x, d_x] in place of K and Q, in float64.
    """

    v: Tensor

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        for name, values in vars(heads).items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(np.array(values))))

    @property
    def M(self) -> Float[Tensor, "d_x d_x"]:
        """sum_h v_h K_h^T Q_h, or sum_h v_h U_h."""
        if hasattr(self, "U"):
            return torch.einsum("h,hij->ij", self.v, self.U)
        return torch.einsum("h,hri,hrj->ij", self.v, self.K, self.Q)

    def forward(self, prompts: Prompts) -> Float[Tensor, "batch 1 1"]:
        """Predictions at the query."""
        x, y, query = (each.to(self.v) for each in (prompts.x, prompts.y, prompts.x_query))
        b = torch.einsum("nli,nlo->ni", x, y) / x.shape[1]
        return torch.einsum("ni,ij,nj->n", b, self.M, query)[:, None, None]


@dataclass(frozen=True, eq=False)
class Entry:
    """A model of the suite.

    Example:
        >>> entry = suite()["gd-2"]
        >>> entry.truth.algorithm.value, entry.truth.heads.value.shape
        ('gradient_descent', (2, 1))
        >>> batch = entry.sample(64, seed=0)
        >>> bool(entry.loss(entry.module, batch) < batch.y_query.square().mean())
        True
    """

    name: str
    kind: str
    """"hand-made", "trained", or "minimum" for linear attention at a minimum of its loss."""
    path: Path
    truth: Truth
    counted: bool = False
    """True if `module` has the entries alone that a known learning coefficient counts."""

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model with its task, in float64."""
        read = load(self.path)
        return replace(read, weights=read.weights.to(torch.float64))

    @property
    def task(self) -> TaskConfig:
        """Task of the prompts."""
        return self.checkpoint.task

    @property
    def hooked(self) -> ICLTransformer:
        """The model with TransformerLens' hooks."""
        return self.checkpoint.model

    @cached_property
    def module(self) -> nn.Module:
        """The model as a plain module that takes prompts; where the learning coefficient is known, with the entries as
        parameters that it counts."""
        if self.counted:
            return LinearHeads(heads_of_linear(self.checkpoint.weights))
        return self.as_linear_module()

    def as_linear_module(self) -> nn.Module:
        """A copy of the model whose q, k, v and o are nn.Linear."""
        return self.hooked.as_linear_module()

    def sample(self, n: int, seed: int = 0) -> Prompts:
        """Fresh prompts of the task, in float64."""
        generator = generator_for(seed, "eval", 0)
        return draw_prompts(self.task, n, generator=generator, dtype=torch.float64)

    @cached_property
    def pairs(self) -> tuple[Prompts, Prompts]:
        """Clean and corrupted prompts of the effects of heads and edges; they differ in the task vector."""
        pairs = clean_and_corrupted(self.checkpoint, None, None, n_prompts=N_PAIRS, seed=0)
        return pairs[0].to(torch.float64), pairs[1].to(torch.float64)

    def loss(self, module: nn.Module, batch: Prompts | None = None) -> Float[Tensor, ""]:
        """Mean squared error at the query, in y^2.

        Args:
            batch: Prompts; None: all prompts of the task, exactly, for a module with a known learning coefficient.
        Raises:
            ValueError: Without a batch if the loss over all prompts has no closed form.
        """
        if batch is not None:
            predicted = module(batch)[:, -1]
            return (predicted - batch.y_query.to(predicted)).square().mean()
        if not isinstance(module, LinearHeads):
            raise ValueError(f"loss needs a batch for the {type(module).__name__} of {self.name}.")
        moments = task_moments(self.task)
        M, size = module.M.flatten(), moments.yz.size
        zz, yz = (torch.from_numpy(each.reshape(-1, size)) for each in (moments.zz, moments.yz))
        return moments.yy - 2 * yz[0] @ M + M @ zz @ M

    def edges(self) -> pd.DataFrame:
        """All edges between heads, with the columns "from" (such as "L0H1") and "to" (such as "L2H0.v")."""
        heads = self.checkpoint.predictor.heads
        rows = [
            (f"L{layer}H{head}", f"L{later}H{other}.{component}")
            for (layer, head), (later, other), component in product(heads, heads, COMPONENTS)
            if layer < later
        ]
        return pd.DataFrame(rows, columns=["from", "to"])

    @property
    def without_truth(self) -> "Entry":
        """The same entry without its answers, as methods get it."""
        blind = replace(self, truth=Truth())
        # A file is read once; models and weights are two, so that hooks and edits which a method leaves change no score.
        blind.__dict__["checkpoint"] = replace(
            self.checkpoint, weights=self.checkpoint.weights.copied()
        )
        return blind

    def __repr__(self) -> str:
        known = [name for name in NAMES if getattr(self.truth, name) is not None]
        return f"Entry({self.name}: {self.kind}; known: {', '.join(known) or 'nothing'})"


@dataclass(frozen=True, eq=False, repr=False)
class Suite(Result, Mapping[str, Entry]):
    """Entries by name."""

    version: int
    entries: Mapping[str, Entry]

    @property
    def hash(self) -> str:
        """SHA-256 of truths.json, which holds the hashes of all weights."""
        return HASHES[self.version]

    def __getitem__(self, name: str) -> Entry:
        if name not in self.entries:
            raise KeyError(f"The suite has {', '.join(self.entries)}, got {name!r}.")
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"Suite(version {self.version}: {len(self)} entries, sha256 {self.hash[:12]})"

    def to_frame(self) -> pd.DataFrame:
        """One row per entry: its kind, and how each answer is known."""
        rows = [
            {"entry": entry.name, "kind": entry.kind}
            | {name: getattr(getattr(entry.truth, name), "how", "") for name in NAMES}
            for entry in self.entries.values()
        ]
        return pd.DataFrame(rows)


def edge_place(sender: str, receiver: str) -> tuple[int, ...]:
    """Index of an edge in the array of effects.

    Example:
        >>> edge_place("L0H1", "L2H3.v")
        (2, 0, 1, 2, 3)
    """
    numbers = [int(each) for each in re.findall(r"\d+", f"{sender} {receiver}")]
    return (COMPONENTS.index(receiver[-1]), *numbers)


def suite(version: int = 1, *, trained: str = "bundled") -> Suite:
    """Models with known answers.

    Args:
        version: Version of the suite. A version never changes: its hash is checked.
        trained: Trained models: "bundled" for those in the package, "all" for all (needs a clone), or "none".
    Raises:
        ValueError: If there is no such version or choice, a trained model is not there, or a file differs from that of
            the version.
    Example:
        >>> len(suite(trained="none")), suite()["gd-2"]
        (31, Entry(gd-2: hand-made; known: edges, heads, algorithm, components))
    """
    if version not in HASHES:
        raise ValueError(f"version must be one of {', '.join(map(str, HASHES))}, got {version}.")
    if trained not in TRAINED:
        raise ValueError(f"trained must be one of {', '.join(TRAINED)}, got {trained!r}.")
    text = (FOLDER / TRUTHS).read_bytes()
    _require_hash(text, HASHES[version], FOLDER / TRUTHS)
    entries = {}
    for name, document in json.loads(text).items():
        kind = document["kind"]
        path = FOLDER / name
        if document["trained"]:
            path = BUNDLED / name
            if trained == "none" or (trained == "bundled" and not path.is_dir()):
                continue
            path = path if path.is_dir() else CLONE / name
            if not path.is_dir():
                raise ValueError(
                    f'trained="all" needs a clone of the repository: there is no {path}.'
                )
        weights = path / document["file"]
        _require_hash(weights.read_bytes(), document["sha256"], weights)
        truth = truth_from(document["truth"])
        counted = truth.learning_coefficient is not None
        entries[name] = Entry(name, kind, path, truth, counted)
    return Suite(version, entries)


def truth_from(document: Mapping[str, Mapping[str, Any]]) -> Truth:
    """The truth of an entry from its JSON document, where null stands for NaN."""
    known = {}
    for name, stated in document.items():
        value = stated["value"]
        if isinstance(value, list):
            value = np.array(value, dtype=float)
        known[name] = Known(value, stated["how"], stated["error"])
    return Truth(**known)


def _require_hash(content: bytes, expected: str, file: Path) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{file} must have the SHA-256 {expected[:12]}..., got {found[:12]}....")
