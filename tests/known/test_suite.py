"""The suite: its files are those of its version, and every answer is computed again by other code."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian
from torch.func import functional_call

from analyses.known import truths
from analyses.known.build import SHAPLEY_PROMPTS
from analyses.known.models import CS, ETAS, GAMMAS, TASK, WIDE
from mechinterp import predictor_of, sample_prompts
from mechinterp.icl.prompts import Prompts
from mechinterp.known import Entry, suite
from mechinterp.known.entries import FOLDERS, HASHES, TRUTHS, LinearHeads
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.theory.linear import MergedHeads, SeparateHeads
from tests.conftest import refused, sampled

ROOT = Path(__file__).parents[2]
ALL = suite(1, trained="all")
FEW = {
    *("gd-2", "gd-2-dead-heads", "gd-plus-plus-2", "preconditioned-2", "debiased-pair", "kernel"),
    *("minimum-2", "softmax-h2-s0", "pool-gpt2-m16-s0"),
}
"""Entries whose effects `make test` computes again; of the others `make test-all`."""


def test_the_version_is_that_of_its_files_and_of_the_citation():
    assert hashlib.sha256((FOLDERS[1] / TRUTHS).read_bytes()).hexdigest() == HASHES[1]
    assert HASHES[1] in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert len(ALL) == len(suite(1, trained="none")) + 15
    assert len(suite(1)) == len(ALL) - 5


def test_a_changed_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    text = (FOLDERS[1] / TRUTHS).read_text(encoding="utf-8")
    monkeypatch.setitem(FOLDERS, 1, tmp_path)
    (tmp_path / TRUTHS).write_text(text.replace("gradient_descent", "gradient_ascent"))
    with refused(TRUTHS):
        suite(1)


def test_what_it_lacks_is_refused():
    with refused("version", 3):
        suite(3)
    with refused("trained", "'most'"):
        suite(trained="most")
    with pytest.raises(KeyError, match="gd-9"):
        ALL["gd-9"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(ALL, keep=FEW.__contains__))
def test_effects_are_those_of_other_code(name: str):
    """Edges: the clean output is added to what one input of one head reads. Heads: it is added to the stream."""
    entry = ALL[name]
    heads, difference = truths.heads(entry.checkpoint, *entry.pairs)
    found = [(entry.truth.heads, heads)]
    assert difference < 1e-9 * np.abs(heads).max()
    if entry.truth.edges is not None:
        found.append((entry.truth.edges, truths.edges_again(entry.checkpoint, *entry.pairs)))
    if entry.truth.shapley is not None:
        prompts = entry.sample(SHAPLEY_PROMPTS)
        found.append((entry.truth.shapley, truths.shapley_again(entry.checkpoint, prompts)))
    for known, again in found:
        bound = 1e-9 * np.nanmax(np.abs(again))
        np.testing.assert_allclose(known.value, again, rtol=0, atol=bound)


@pytest.mark.parametrize("name", [n for n, e in ALL.items() if e.truth.learning_coefficient])
def test_the_learning_coefficient_is_half_the_rank_of_the_second_derivative(name: str):
    """At these minima the flat directions form a manifold, so that only directions with a curvature count."""
    entry = ALL[name]
    shapes = {n: p.shape for n, p in entry.module.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    at = torch.cat([p.detach().flatten() for p in entry.module.parameters()])

    def loss(point: torch.Tensor) -> torch.Tensor:
        parts = zip(shapes.items(), point.split(sizes), strict=True)
        tensors = {f"module.{n}": part.view(shape) for (n, shape), part in parts}
        return functional_call(_Loss(entry), tensors, ())

    curvatures = torch.linalg.eigvalsh(hessian(loss, at))
    gradient = torch.autograd.functional.jacobian(loss, at)
    assert gradient.abs().max() < 1e-4
    # The least that count are above 5e-3 of the largest; flat ones of trained models are below 3e-5.
    counted = int((curvatures > 1e-3 * curvatures.max()).sum())
    assert counted / 2 == entry.truth.learning_coefficient.value


class _Loss(torch.nn.Module):
    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry, self.module = entry, entry.module

    def forward(self) -> torch.Tensor:
        return self.entry.loss(self.module)


@pytest.mark.parametrize("name", ["minimum-2", "linear-merged-s0"])
def test_the_exact_loss_is_the_limit_of_losses_on_prompts(name: str):
    entry = ALL[name]
    errors = []
    for seed in range(2):
        batch = entry.sample(10_000, seed)
        predicted = entry.module(batch)[:, -1]
        torch.testing.assert_close(predicted, entry.checkpoint.predictor.predict(batch))
        errors.append((predicted - batch.y_query).square().detach())
    every = torch.cat(errors)
    sem = every.std() / len(every) ** 0.5
    assert abs(every.mean() - entry.loss(entry.module)) < 4 * sem


def moments(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """S = X^T X / L, b = X^T y / L and the query."""
    x, y = prompts.x, prompts.y
    n = x.shape[1]
    return x.mT @ x / n, x.mT @ y / n, prompts.x_query[:, None]


def descended(prompts: Prompts, steps: int) -> torch.Tensor:
    S, b, query = moments(prompts)
    w = torch.zeros_like(b)
    for eta in ETAS[:steps]:
        w = w + eta * (b - S @ w)
    return (query @ w)[:, 0]


def preprocessed(prompts: Prompts, steps: int) -> torch.Tensor:
    """Gradient descent on x times its correlation with y."""
    r = moments(prompts)[1].mT
    x, query = prompts.x * r, prompts.x_query[:, None] * r
    u = torch.zeros_like(r.mT)
    for eta in (0.3, 0.2)[:steps]:
        u = u + eta * x.mT @ (prompts.y - x @ u) / x.shape[1]
    return (query @ u)[:, 0]


def preconditioned(prompts: Prompts, steps: int) -> torch.Tensor:
    S, b, query = moments(prompts)
    Sigma = torch.tensor(WIDE.covariance.eigenvalues, dtype=S.dtype)
    w = torch.zeros_like(b)
    for eta, c in zip(ETAS[:steps], CS[:steps], strict=True):
        w = w + eta * (b - S @ w) / (Sigma + c)[:, None]
    return (query @ w)[:, 0]


def plus_plus(prompts: Prompts, steps: int) -> torch.Tensor:
    """A step on the residual y - f and then x <- (1 - gamma X^T X / L) x, for the context and the query."""
    x, rest, query = prompts.x, prompts.y, prompts.x_query[:, None]
    f = torch.zeros_like(query[..., :1])
    for eta, gamma in zip(ETAS[:steps], GAMMAS[:steps], strict=True):
        S, b = x.mT @ x / x.shape[1], x.mT @ rest / x.shape[1]
        f, rest = f + eta * query @ b, rest - eta * x @ b
        x, query = x - gamma * x @ S, query - gamma * query @ S
    return f[:, 0]


RUN: dict[str, Callable[[Prompts, int], torch.Tensor]] = {
    "gd": descended,
    "gd-plus-plus": plus_plus,
    "preconditioned": preconditioned,
    "preprocess": preprocessed,
}


@pytest.mark.parametrize("name", [n for n in ALL if n.rstrip("1234").rstrip("-") in RUN])
@pytest.mark.parametrize("suffix", ["", "-rotated", "-dead-heads"])
def test_stacks_by_hand_run_their_algorithm(name: str, suffix: str):
    if name + suffix not in ALL:
        return
    algorithm, _, steps = name.rpartition("-")
    entry = ALL[name + suffix]
    prompts = entry.sample(64)
    expected = RUN[algorithm](prompts, int(steps))
    torch.testing.assert_close(entry.module(prompts)[:, -1], expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(entry.checkpoint.predictor.predict(prompts), expected)


SOFTMAX = {
    "debiased-pair": ((0.15, 1), (-0.15, -1)),
    "debiased-two-pairs": ((0.15, 2.0), (-0.15, -2.0), (0.15, 1.0), (-0.15, -1.0)),
    "kernel": ((0.6, 1.2),),
}
"""omega and mu of each head; for the pair, mu up to a common factor."""


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_heads_by_hand_are_weighted_means_of_y(name: str):
    prompts = ALL[name].sample(64)
    scores = torch.einsum("nli,ni->nl", prompts.x, prompts.x_query)
    expected = torch.zeros_like(prompts.y_query)
    for omega, mu in SOFTMAX[name]:
        expected += mu * torch.einsum("nl,nlo->no", (omega * scores).softmax(1), prompts.y)
    found = ALL[name].module(prompts)[:, -1]
    factor = (found / expected).mean() if name == "debiased-pair" else 1.0
    torch.testing.assert_close(found, factor * expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [n for n, e in ALL.items() if e.truth.components is not None])
def test_components_are_singular_vectors_of_the_circuits(name: str):
    """A direction that a head reads or writes alone is an eigenvector of what its circuit reads and writes."""
    entry = ALL[name]
    weights = entry.checkpoint.weights
    known = torch.from_numpy(entry.truth.components.value)
    alive = weights.W_O.flatten(2).any(-1)
    QK = (weights.W_Q @ weights.W_K.mT) * alive[:, :, None, None]
    used = torch.stack([QK @ QK.mT, QK.mT @ QK]).flatten(0, 2)
    OV = weights.W_V @ weights.W_O
    used = torch.cat([used, torch.stack([OV @ OV.mT, OV.mT @ OV]).flatten(0, 2)])
    images = torch.einsum("hij,cj->hci", used, known)
    along = torch.einsum("hci,ci->hc", images, known)
    torch.testing.assert_close(images, along[..., None] * known, rtol=1e-9, atol=1e-9)
    assert (along.abs().amax(0) > 1e-6).all()


def test_a_rotated_stream_has_the_same_effects_and_rotated_components():
    one, other = ALL["preconditioned-3"], ALL["preconditioned-3-rotated"]
    np.testing.assert_allclose(one.truth.edges.value, other.truth.edges.value, atol=1e-12)
    # A component is read from the token as before: W_in maps the token to the stream.
    W_in = other.checkpoint.weights.reading[0].numpy()
    np.testing.assert_allclose(W_in, other.truth.components.value, atol=1e-12)


def test_dead_heads_have_no_effect_and_the_live_ones_theirs():
    one, other = ALL["gd-3"].truth.heads.value, ALL["gd-3-dead-heads"].truth.heads.value
    assert (np.abs(other) > 1e-12).sum(1).tolist() == [1, 1, 1]
    np.testing.assert_allclose(other.sum(1, keepdims=True), one, atol=1e-12)


def test_methods_get_no_answers():
    blind = ALL["minimum-2"].without_truth
    assert all(value is None for value in vars(blind.truth).values())
    assert sum(p.numel() for p in blind.module.parameters()) == 2 * (1 + 4 + 4)


def test_linear_heads_predict_as_the_model_they_stand_for():
    """Random heads, whose M is not symmetric, as it is at the minima of the suite."""
    task, rng = TASK, np.random.default_rng(0)
    K, Q = rng.normal(size=(2, 3, 1, task.d_x))
    for heads in (
        SeparateHeads(v=rng.normal(size=3), K=K, Q=Q),
        MergedHeads(v=rng.normal(size=3), U=rng.normal(size=(3, task.d_x, task.d_x))),
    ):
        weights = linear_attention(heads).to(torch.float64)
        prompts = sample_prompts(task, 8).to(torch.float64)
        expected = predictor_of(weights).predict(prompts)
        found = LinearHeads(heads)(prompts)[:, -1].detach()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_method_that_edits_the_weights_changes_no_entry():
    entry = suite(1, trained="none")["gd-2"]
    prompts = entry.sample(4)
    before = entry.checkpoint.predictor.predict(prompts)
    given = entry.without_truth.checkpoint
    for tensor in given.weights.tensors.values():
        tensor.zero_()
    torch.testing.assert_close(entry.checkpoint.predictor.predict(prompts), before, rtol=0, atol=0)
    assert given.predictor.predict(prompts).abs().max() == 0
