"""The hand-made models of version 2 compute what their names say, and hold their variables where the truth says."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.func import functional_call

from analyses.known.graphs import EPSILON
from analyses.known.models import ETAS
from analyses.known.models_2 import GATES, OMEGA, SHARES, TWO_HEADS
from mechinterp.icl.prompts import Prompts
from mechinterp.known import Entry, suite
from mechinterp.known.variables import interchanged
from mechinterp.theory.reduced_rank import reduced_rank_coefficient

HAND = suite(2, trained="none")
N = 64


def predicted(name: str) -> tuple[Prompts, Tensor]:
    """Prompts, and the prediction of an entry, by the plain module and by the package alike."""
    entry = HAND[name]
    prompts = entry.sample(N)
    found = entry.checkpoint.predictor.predict(prompts)
    torch.testing.assert_close(entry.module(prompts)[:, -1], found, rtol=1e-9, atol=1e-9)
    return prompts, found


def descended(prompts: Prompts, etas: list[float]) -> Tensor:
    S = prompts.x.mT @ prompts.x / prompts.x.shape[1]
    b = prompts.x.mT @ prompts.y / prompts.x.shape[1]
    w = torch.zeros_like(b)
    for eta in etas:
        w = w + eta * (b - S @ w)
    return (prompts.x_query[:, None] @ w)[:, 0]


STEPS = {
    **{f"mlp-carry-{n}": ETAS[:n] for n in (1, 2)},
    **{f"mlp-{which}-{n}": ETAS[:n] for n in (1, 2) for which in ("max", "min")},
    **{name: ETAS[:n] for name, (n, _) in SHARES.items()},
    **{f"backup-gd-{n}": (1.0,) * n for n in (2, 3)},
    **{f"wide-gd-{n}": ETAS[:n] for n in (2, 3)},
    "mlp-split-2": ETAS[:2],
    "backup-or": ETAS[:1],
    "joint-and": ETAS[:1],
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("ending", ["", "-rotated"])
def test_models_of_gradient_descent_take_its_steps(name: str, ending: str):
    if name + ending not in HAND:
        return
    prompts, found = predicted(name + ending)
    torch.testing.assert_close(found, descended(prompts, STEPS[name]), rtol=1e-9, atol=1e-10)
    assert HAND[name + ending].truth.algorithm.value == "gradient_descent"


def test_mlps_compute_their_function_of_a_step():
    prompts, clipped = predicted("mlp-clip-1")
    f = descended(prompts, ETAS[:1])
    torch.testing.assert_close(clipped, f.clamp(-0.5, 0.5), rtol=1e-9, atol=1e-10)
    # gelu(u) + gelu(-u) = sqrt(2 / pi) u^2 (1 - u^2 / 6 + ...)
    _, squared = predicted("mlp-square-1")
    assert ((squared - f - f**2).abs() <= (EPSILON * f) ** 2 / 6 * f**2 + 1e-9).all()
    parts = []
    for kept in (slice(0, 2), slice(2, 4)):
        x, query = torch.zeros_like(prompts.x), torch.zeros_like(prompts.x_query)
        x[..., kept], query[:, kept] = prompts.x[..., kept], prompts.x_query[:, kept]
        b = x.mT @ prompts.y / x.shape[1]
        parts.append(ETAS[0] * (query[:, None] @ b)[:, 0])
    _, product = predicted("mlp-product-1")
    torch.testing.assert_close(product, parts[0] * parts[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n", [2, 3])
def test_softmax_stacks_run_their_formula(n: int):
    prompts, found = predicted(f"softmax-stack-{n}")
    y, f = prompts.y, torch.zeros_like(prompts.y_query)
    for eta in ETAS[:n]:
        moved = [torch.zeros_like(y), torch.zeros_like(f)]
        for sign in (1, -1):
            scores = sign * OMEGA * torch.stack([prompts.x @ prompts.x.mT])[0]
            of_query = sign * OMEGA * torch.einsum("nd,nld->nl", prompts.x_query, prompts.x)
            factor = sign * eta / (2 * OMEGA)
            moved[0] = moved[0] + factor * scores.softmax(-1) @ y
            moved[1] = moved[1] + factor * torch.einsum("nl,nlo->no", of_query.softmax(-1), y)
        y, f = y - moved[0], f + moved[1]
    torch.testing.assert_close(found, f, rtol=1e-9, atol=1e-10)


def test_the_smoother_is_boosted():
    prompts, found = predicted("softmax-kernel-2")
    inner = (0.6 * prompts.x @ prompts.x.mT).softmax(-1)
    of_query = (0.6 * torch.einsum("nd,nld->nl", prompts.x_query, prompts.x)).softmax(-1)
    rest = prompts.y - inner @ prompts.y
    expected = torch.einsum("nl,nlo->no", of_query, prompts.y + rest)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def kept(prompts: Prompts, y: Tensor, *, gate: float, eta: float) -> Tensor:
    """Prediction at each position of descent with forgetting on the pairs before it."""
    x = torch.cat([prompts.x, prompts.x_query[:, None]], 1)
    w, out = torch.zeros_like(x[:, 0, :, None]), []
    for t in range(x.shape[1]):
        out.append((x[:, t, None] @ w)[:, 0])
        if t < y.shape[1]:
            w = gate * w + eta * x[:, t, :, None] * y[:, t, None]
    return torch.stack(out, 1)


def test_gated_heads_and_layers_forget():
    prompts, side_by_side = predicted("recurrent-gated-two-heads")
    each = [
        kept(prompts, prompts.y, gate=g, eta=eta) for g, eta in zip(GATES, TWO_HEADS, strict=True)
    ]
    torch.testing.assert_close(side_by_side, (each[0] + each[1])[:, -1], rtol=1e-9, atol=1e-10)
    _, stacked = predicted("recurrent-gated-stack")
    # The second layer has the step of the first and its own gate, and learns what is left.
    rest = prompts.y - each[0][:, :-1]
    second = kept(prompts, rest, gate=GATES[1], eta=TWO_HEADS[0])
    torch.testing.assert_close(stacked, (each[0] + second)[:, -1], rtol=1e-9, atol=1e-10)


def single_and_all(entry: Entry, kind: str) -> tuple[np.ndarray, float]:
    truth = entry.truth
    return getattr(truth, f"heads_{kind}").value, getattr(truth, f"subsets_{kind}").value[-1]


@pytest.mark.parametrize("name", ["backup-gd-2", "backup-gd-2-rotated", "backup-or"])
def test_one_head_stands_in_for_another(name: str):
    """Without one of two heads little is lost, without both all."""
    entry = HAND[name]
    shapley, zero = (getattr(entry.truth, f"{of}_zero").value for of in ("shapley", "heads"))
    alone = np.abs(zero).max()
    assert alone < 0.15 * np.abs(shapley.sum())


def test_of_two_heads_that_are_needed_each_carries_all():
    """The smaller of both is the prediction, so that 0 in place of one is 0 in place of both."""
    truth = HAND["joint-and"].truth
    zero = truth.heads_zero.value[0]
    np.testing.assert_allclose(zero, truth.shapley_zero.value.sum(), rtol=1e-9)
    # And with an or, 0 in place of one changes nothing.
    np.testing.assert_allclose(HAND["backup-or"].truth.heads_zero.value, 0, atol=1e-12)


@pytest.mark.parametrize("kind", ["in", "out"])
def test_redundant_and_opposed_heads_have_the_effects_of_their_shares(kind: str):
    """One layer: the part a of a step that moves the prediction by d has the effect -(a d)^2 patched out, and
    (1 - (1 - a)^2) d^2 patched in."""
    for name in ("redundant-gd-1", "opposed-gd-1"):
        single, every = single_and_all(HAND[name], kind)
        shares = np.array(SHARES[name][1])
        expected = 1 - (1 - shares) ** 2 if kind == "in" else shares**2
        np.testing.assert_allclose(single[0], expected * every, rtol=1e-9)


def test_an_edge_through_an_mlp_carries_the_step():
    entry = HAND["mlp-carry-1"]
    for kind in ("in", "out"):
        effects = entry.edges().assign(value=getattr(entry.truth, f"edges_{kind}").value)
        by_edge = effects.set_index(["from", "to"])["value"]
        _, every = single_and_all(entry, kind)
        path = [("input", "L0H0.v"), ("L0H0", "L0MLP"), ("L0MLP", "output")]
        np.testing.assert_allclose([by_edge[edge] for edge in path], every, rtol=1e-9)
        others = effects[~effects[["from", "to"]].apply(tuple, axis=1).isin(path)]
        np.testing.assert_allclose(others["value"], 0, atol=1e-12)


EXACT = [
    name
    for name, entry in HAND.items()
    if entry.variables and entry.truth.variables is not None and "noise" not in name
]


@pytest.mark.parametrize("name", EXACT)
def test_interchange_in_the_true_subspace_is_that_of_the_algorithm(name: str):
    entry = HAND[name]
    base, source = entry.base_and_source
    for variable in entry.variables:
        basis = entry.truth.variables.value[variable.name]
        found = interchanged(entry.hooked, variable, basis, base, source)
        expected = variable.counterfactual(entry.hooked, base, source)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
        assert (found - entry.checkpoint.predictor.predict(base)).abs().max() > 1e-3


def test_interchange_of_the_prediction_after_a_layer_has_a_formula():
    """The later steps add the same, whatever the prediction at the query was: it moves as the prediction after the layer."""
    entry = HAND["gd-3-rotated"]
    base, source = entry.base_and_source
    for layer, variable in enumerate(entry.variables, start=1):
        moved = [descended(each, ETAS[:layer]) for each in (source, base)]
        expected = descended(base, ETAS[:3]) + moved[0] - moved[1]
        basis = entry.truth.variables.value[variable.name]
        found = interchanged(entry.hooked, variable, basis, base, source)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_interchange_of_the_state_of_a_recurrent_layer_asks_the_source_about_the_query_of_the_base():
    entry = HAND["recurrent-gated"]
    base, source = entry.base_and_source
    (variable,) = entry.variables
    mixed = Prompts(**{**vars(source), "x_query": base.x_query})
    found = interchanged(entry.hooked, variable, variable.basis, base, source)
    expected = entry.checkpoint.predictor.predict(mixed)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_random_weights_hold_no_variable_and_have_its_question():
    for name in ("random-gd-3", "random-wide-gd-2"):
        entry = HAND[name]
        assert entry.truth.variables is None
        assert entry.variables
        assert entry.truth.algorithm is None
        base, source = entry.base_and_source
        own = entry.checkpoint.predictor.predict(base)
        for layer, variable in enumerate(entry.variables, start=1):
            moved = [descended(each, ETAS[:layer]) for each in (source, base)]
            found = variable.counterfactual(entry.hooked, base, source)
            torch.testing.assert_close(found, own + moved[0] - moved[1], rtol=1e-8, atol=1e-8)


SINGULAR = [name for name in HAND if name.startswith("singular")]


@pytest.mark.parametrize("name", SINGULAR)
def test_at_a_singular_minimum_the_coefficient_is_above_half_the_rank_of_the_second_derivative(
    name: str,
):
    entry = HAND[name]
    module, flat = (
        entry.module,
        torch.nn.utils.parameters_to_vector(entry.module.parameters()).detach(),
    )
    loss = partial(_loss_at, entry, module)
    assert torch.autograd.functional.jacobian(loss, flat).abs().max() < 1e-6
    curvatures = torch.linalg.eigvalsh(hessian(loss, flat))
    half = int((curvatures > 1e-6 * curvatures.max()).sum()) / 2
    rank, d = entry.task.n_tasks, entry.task.d_x
    assert half == rank * (2 * d - rank) / 2
    exact = entry.truth.learning_coefficient.value
    assert exact == reduced_rank_coefficient(d, d, n_hidden=module.v.numel(), rank=rank)
    assert exact > half
    # It is a minimum: no weights nearby have a lower loss.
    generator = torch.Generator().manual_seed(0)
    around = flat + 0.1 * torch.randn(64, len(flat), generator=generator, dtype=flat.dtype)
    assert min(loss(each) for each in around) > loss(flat)


def _loss_at(entry: Entry, module: torch.nn.Module, flat: Tensor) -> Tensor:
    named, at = {}, 0
    for name, each in module.named_parameters():
        named[f"module.{name}"] = flat[at : at + each.numel()].view(each.shape)
        at += each.numel()
    return functional_call(_Loss(entry, module), named, ())


class _Loss(torch.nn.Module):
    def __init__(self, entry: Entry, module: torch.nn.Module) -> None:
        super().__init__()
        self.entry, self.module = entry, module

    def forward(self) -> Tensor:
        return self.entry.loss(self.module)
