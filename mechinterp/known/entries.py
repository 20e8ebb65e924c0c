"""The suite: models with known answers, and what is known about each.

Folder `suite_1` has the hand-made models of version 1 and truths.json, whose hash names the version. Folder `suite_2` has
those that version 2 adds, its own truths.json, and truths.safetensors with the arrays. Trained models are the shipped
ones. Each truths.json has the hash of every file that its version reads."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from safetensors.numpy import load as read_arrays
from torch import Tensor, nn

from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.patching.graph import COMPONENTS, graph_of
from mechinterp.analysis.patching.pairing import clean_and_corrupted
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.shipped import BUNDLED, CLONE
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.known.truth import TRUTH_NAMES, Known, Truth, truth_from
from mechinterp.known.variables import Variable
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.theory.linear import Heads
from mechinterp.training.linear_models import task_moments

__all__ = ["Entry", "Known", "LinearHeads", "Suite", "Truth", "edge_place", "suite"]
FOLDER = Path(__file__).parent / "suite_1"
FOLDERS = {1: FOLDER, 2: Path(__file__).parent / "suite_2"}
TRUTHS = "truths.json"
ARRAYS = "truths.safetensors"
HASHES = {
    1: "625d98716b10cab7d13d302fc2a582cbfdcf9f65ce26ad129d7af827e3ea098b",
    2: "79441fb7c3097430b07f9a2f11c2715d8e9024d142e04f707f5a5b706b24ac2a",
}
"""SHA-256 of truths.json of each version."""
TRAINED = ("bundled", "all", "none")
N_PAIRS = 32
"""Number of pairs of prompts on which effects of heads and edges are computed."""
N_INTERCHANGED = 64
"""Number of pairs of base and source prompts on which subspaces are scored."""


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
        >>> entry = suite(2)["gd-2"]
        >>> entry.truth.algorithm.value, entry.truth.heads_in.value.shape
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
    version: int = 1
    """Version of the suite."""
    variables: tuple[Variable, ...] = ()
    """Variables of an algorithm that a subspace of the model may hold; version 2."""

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
        if self.checkpoint.config.model.recurrent:
            return self.hooked
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

    @property
    def base_and_source(self) -> tuple[Prompts, Prompts]:
        """Base and source prompts on which subspaces are scored: independent draws of the task."""
        drawn = self.sample(2 * N_INTERCHANGED, seed=1)
        return drawn[:N_INTERCHANGED], drawn[N_INTERCHANGED:]

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
        """All edges, with the columns "from" and "to".

        Version 1 has the edges between heads, such as "L0H1" to "L2H0.v". Version 2 has those of the whole model, also from
        the "input", from and to an MLP such as "L0MLP", and to the "output".
        """
        if self.version == 1:
            heads = self.checkpoint.predictor.heads
            rows = [
                (f"L{layer}H{head}", f"L{later}H{other}.{component}")
                for (layer, head), (later, other), component in product(heads, heads, COMPONENTS)
                if layer < later
            ]
        else:
            senders, receivers = graph_of(self.checkpoint.predictor.hooked, "all")
            rows = [
                (one.name, two.name)
                for one, two in product(senders, receivers)
                if one.time < two.time
            ]
        return pd.DataFrame(rows, columns=["from", "to"])

    @property
    def without_truth(self) -> "Entry":
        """Copy of the entry without its answers, as methods get it."""
        blind = replace(self, truth=Truth())
        # A file is read once; models and weights are two, so that hooks and edits which a method leaves change no score.
        blind.__dict__["checkpoint"] = replace(
            self.checkpoint, weights=self.checkpoint.weights.copied()
        )
        return blind

    def __repr__(self) -> str:
        known = [name for name in TRUTH_NAMES if getattr(self.truth, name) is not None]
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
        """One row per entry: its kind, and how each answer is known; answers known for no entry are left out."""
        truths = [entry.truth for entry in self.entries.values()]
        names = [name for name in TRUTH_NAMES if any(getattr(truth, name) for truth in truths)]
        rows = [
            {"entry": entry.name, "kind": entry.kind}
            | {name: getattr(getattr(entry.truth, name), "how", "") for name in names}
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


def suite(version: int | None = None, *, trained: str = "bundled") -> Suite:
    """Models with known answers.

    Args:
        version: Version of the suite; None: the newest. A version never changes: its hash is checked.
        trained: Trained models: "bundled" for those in the package, "all" for all (needs a clone), or "none".
    Raises:
        ValueError: If there is no such version or choice, a trained model is not there, or a file differs from that of
            the version.
    Example:
        >>> len(suite(1, trained="none")), suite(1)["gd-2"]
        (31, Entry(gd-2: hand-made; known: edges, heads, algorithm, components))
        >>> suite().version
        2
    """
    version = max(HASHES) if version is None else version
    if version not in HASHES:
        raise ValueError(f"version must be one of {', '.join(map(str, HASHES))}, got {version}.")
    if trained not in TRAINED:
        raise ValueError(f"trained must be one of {', '.join(TRAINED)}, got {trained!r}.")
    entries, documents = {}, documents_of(version)
    for name, document in documents.items():
        path = _folder_of(name, document, version, trained)
        if path is None:
            continue
        weights = path / document["file"]
        _require_hash(weights.read_bytes(), document["sha256"], weights)
        truth = truth_from(document["truth"], document.get("arrays"))
        counted = truth.learning_coefficient is not None
        variables = _variables(document, documents, path)
        entries[name] = Entry(name, document["kind"], path, truth, counted, version, variables)
    return Suite(version, entries)


def _variables(
    document: Mapping[str, Any], documents: Mapping[str, Any], own: Path
) -> tuple[Variable, ...]:
    """Variables of an entry, with the hand-made model that computes each exactly; for trained models their own."""
    found = []
    for stated in document.get("variables", ()):
        other = stated.get("reference")
        reference = document if other is None else documents[other]
        path = own if other is None else FOLDERS[reference["suite"]] / other
        basis = reference["arrays"][f"variables/{stated['name']}"]
        place = {name: stated[name] for name in ("name", "hook", "at", "size")}
        found.append(Variable(**place, path=path, basis=basis))
    return tuple(found)


def documents_of(version: int) -> dict[str, dict[str, Any]]:
    """JSON document of each entry of a version; those of version 2 have the arrays of the truth, too.

    Raises:
        ValueError: If a file differs from that of the version.
    """
    folder = FOLDERS[version]
    text = (folder / TRUTHS).read_bytes()
    _require_hash(text, HASHES[version], folder / TRUTHS)
    stated = json.loads(text)
    if version == 1:
        return stated
    content = (folder / ARRAYS).read_bytes()
    _require_hash(content, stated["arrays"], folder / ARRAYS)
    documents = stated["entries"]
    for name, values in read_arrays(content).items():
        entry, truth = name.split("/", 1)
        documents[entry].setdefault("arrays", {})[truth] = values
    return documents


def _folder_of(name: str, document: Mapping[str, Any], version: int, trained: str) -> Path | None:
    """Folder of the model of an entry; None if the choice of trained models leaves it out."""
    if not document["trained"]:
        return FOLDERS[document.get("suite", version)] / name
    path = BUNDLED / name
    if trained == "none" or (trained == "bundled" and not path.is_dir()):
        return None
    path = path if path.is_dir() else CLONE / name
    if not path.is_dir():
        raise ValueError(f'trained="all" needs a clone of the repository: there is no {path}.')
    return path


def _require_hash(content: bytes, expected: str, file: Path) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{file} must have the SHA-256 {expected[:12]}..., got {found[:12]}....")
