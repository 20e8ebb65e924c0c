"""Edges between heads: estimates as TransformerLens makes them, patches as one makes them by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    attribution_patch,
)

from mechinterp.analysis.patching.edges import COMPONENTS, attribute_edges
from mechinterp.analysis.patching.positions import first_prediction
from mechinterp.analysis.stats import rank_correlation
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.read import Stored, read_foreign
from mechinterp.checkpoints.plain_modules import hook_module
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.tokens import interleaved
from tests.deep_models import WIDE, random_gpt2, random_model
from tests.models.test_layered_models import GargModel, garg

TASK = TaskConfig(d_x=4)
KINDS = {
    "causal": {},
    "wide": WIDE,
    "linear": {**WIDE, "score": "linear/L"},
    "merged": {"merged_qk": True},
    "norm and mlp": {"d_model": 8, "d_head": 4, "norm": "before", "final_norm": True, "d_mlp": 16},
}


def drawn(step: int, n_prompts: int = 3) -> Prompts:
    generator = generator_for(0, "eval", step)
    return sample_prompts(
        TASK, n_prompts, generator=generator, context_length=6, dtype=torch.float64
    )


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def model(request: pytest.FixtureRequest) -> ICLTransformer:
    return random_model(3, 2, **request.param)


@pytest.mark.slow
def test_estimates_at_one_point_are_transformer_lens(model: ICLTransformer):
    clean, corrupted = drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted, ig_steps=1, metric=first_prediction)
    expected = np.zeros((3, *found.estimate.shape))
    if model.cfg.attn_only:
        model.set_use_zero_mlp(True)
    for row in range(3):
        pair = [model.tokens(each[row : row + 1]) for each in (clean, corrupted)]
        with model.numbered(*pair) as ids:
            scores = attribution_patch(
                model,
                *ids,
                lambda logits: first_prediction(logits)[0],
                EdgeAttributionConfig("edge"),
            ).edge_scores
        for (writer, reader), score in scores.items():
            if writer.kind == "attn_head_out" and reader.kind.endswith(("q_input", "k_input")):
                part = COMPONENTS.index(reader.kind[0])
                expected[row, part, writer.layer, writer.head, reader.layer, reader.head] += score
            if writer.kind == "attn_head_out" and reader.kind == "v_input":
                expected[row, 2, writer.layer, writer.head, reader.layer, reader.head] += score
    edges = np.isfinite(found.estimate)
    assert edges.sum() == 3 * 3 * 4
    largest = np.abs(expected).max()
    assert largest > 0
    np.testing.assert_allclose(found.estimate[edges], expected.mean(0)[edges], atol=1e-9 * largest)
    sem = expected.std(axis=0, ddof=1)[edges] / 3**0.5
    np.testing.assert_allclose(found.estimate_sem[edges], sem, atol=1e-9 * largest)


def patched_by_hand(model: ICLTransformer, clean, corrupted, edge) -> torch.Tensor:
    """The prediction when one head reads what an earlier one writes on the clean prompts, in another way."""
    component, layer, head, later, later_head = edge
    name = f"blocks.{later}.attn.hook_{COMPONENTS[component]}"
    with torch.no_grad():
        caches = [model.run_with_cache(model.tokens(p))[1] for p in (clean, corrupted)]
        z = caches[0]["z", layer] - caches[1]["z", layer]
        attn = model.blocks[later].attn
        norm = model.blocks[later].ln1 if model.cfg.model.norm else torch.nn.Identity()
        moved = caches[1]["resid_pre", later] + z[:, :, head] @ model.blocks[layer].attn.W_O[head]
        weights = getattr(attn, f"W_{COMPONENTS[component].upper()}")[later_head]

        def put(values, hook):
            values = values.clone()
            values[:, :, later_head] = norm(moved) @ weights
            return values

        return model.run_with_hooks(model.tokens(corrupted), fwd_hooks=[(name, put)])[:, -1, 0]


@pytest.mark.slow
def test_patches_are_those_by_hand_and_leave_the_model_as_it_was(model: ICLTransformer):
    clean, corrupted = drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted, ig_steps=2, metric=first_prediction)
    before = model.predict(corrupted)[:, 0].detach()
    for edge in [(0, 0, 1, 1, 0), (1, 0, 0, 2, 1), (2, 1, 1, 2, 0), (2, 0, 1, 1, 1)]:
        change = patched_by_hand(model, clean, corrupted, edge) - before
        assert found.patched[edge] == pytest.approx(change.mean().item(), rel=1e-8, abs=1e-12)
        sem = change.std().item() / 3**0.5
        assert found.patched_sem[edge] == pytest.approx(sem, rel=1e-8, abs=1e-12)
    gained = model.predict(clean)[:, 0].detach() - before
    assert found.total == pytest.approx(gained.mean().item())
    assert found.total_sem == pytest.approx(gained.std().item() / 3**0.5)


@pytest.mark.slow
def test_integrated_gradients_are_those_along_the_way():
    """The mean over midpoints, by hand: the gradient of what an input of its own adds to one head's values."""
    model, clean, corrupted = random_model(2, 2, **WIDE), drawn(1), drawn(2)
    steps, name = 3, "blocks.1.attn.hook_v_input"
    found = attribute_edges(model, clean, corrupted, ig_steps=steps, metric=first_prediction)
    tokens, other = model.tokens(clean), model.tokens(corrupted)
    caches = [model.run_with_cache(each)[1] for each in (tokens, other)]
    z = (caches[0]["z", 0] - caches[1]["z", 0])[:, :, 1]
    moved = (z @ model.blocks[0].attn.W_O[1]).detach()
    effects = []
    model.set_use_split_qkv_input(True)
    for share in (1 / 6, 3 / 6, 5 / 6):
        size = torch.zeros(3, dtype=torch.float64, requires_grad=True)

        def add(values, hook, size=size):
            values = values.clone()
            values[:, :, 0] += size[:, None, None] * moved
            return values

        between = other + share * (tokens - other)
        logits = model.run_with_hooks(between, fwd_hooks=[(name, add)])
        effects.append(torch.autograd.grad(first_prediction(logits).sum(), size)[0])
    expected = torch.stack(effects).mean(0)
    assert found.estimate[2, 0, 1, 1, 0] == pytest.approx(expected.mean().item(), rel=1e-9)


@pytest.mark.slow
def test_the_metric_by_default_is_nearness_to_the_clean_prediction():
    model, clean, corrupted = random_model(2, 2), drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted)
    gap = (model.predict(clean) - model.predict(corrupted)).detach()
    assert found.total == pytest.approx(gap.square().sum(1).mean().item())
    moved = patched_by_hand(model, clean, corrupted, (2, 0, 0, 1, 0))
    change = gap[:, 0].square() - (model.predict(clean)[:, 0].detach() - moved).square()
    assert found.patched[2, 0, 0, 1, 0] == pytest.approx(change.mean().item(), rel=1e-8)


@pytest.mark.slow
def test_a_model_of_somebody_else_has_edges_too():
    found = attribute_edges(random_gpt2(), drawn(1), drawn(2), metric=first_prediction)
    assert np.isfinite(found.patched).sum() == 3 * 3 * 4
    assert found.rank_correlation > 0.5


@pytest.mark.slow
def test_estimates_rank_edges_as_patches_do():
    """Where the second layer is linear in its values, those edges are estimated without error."""
    model, clean, corrupted = random_model(2, 3, **WIDE, score="linear/L"), drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted, ig_steps=1, metric=first_prediction)
    values = np.isfinite(found.patched[2])
    np.testing.assert_allclose(found.estimate[2][values], found.patched[2][values], rtol=1e-8)
    assert 0.5 < found.rank_correlation <= 1
    assert 0 <= found.rank_correlation_sem < 0.5


class Plain(nn.Module):
    """A GPT-2 of prompts as a plain module."""

    def __init__(self, model: GargModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.model._backbone(inputs_embeds=self.model._read_in(tokens)).last_hidden_state
        return self.model._read_out(stream)[:, -1]


@pytest.mark.slow
def test_edges_of_a_plain_module_are_those_of_its_weights():
    module = garg().double()
    hints = Hints(n_heads=4, task={"d_x": 3, "context_length": 6, "noise_var": 0.0})
    weights = read_foreign([Stored(Path("x.pt"), module.state_dict(), {})], hints)
    hooked = hook_module(Plain(module), heads=4, task=weights.task, embed=interleaved)
    prompts = evaluation_prompts(weights, n_prompts=3)
    expected, found = (attribute_edges(each, prompts) for each in (weights, hooked))
    edges = np.isfinite(expected.patched)
    assert edges.sum() == 3 * 3 * 16
    for name in ("estimate", "patched", "patched_sem"):
        values, own = getattr(expected, name)[edges], getattr(found, name)[edges]
        np.testing.assert_allclose(own, values, atol=1e-9 * np.abs(values).max())


class Layers(nn.Module):
    """Layers of attention, with something behind each or with the sum outside."""

    def __init__(self, behind: nn.Module, *, outside: bool = False) -> None:
        super().__init__()
        self.read_in, self.read_out = nn.Linear(5, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(_Layer(behind, outside=outside) for _ in range(2))
        self.outside = outside

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.read_in(tokens)
        for layer in self.layers:
            stream = layer(stream) + (stream if self.outside else 0)
        return self.read_out(stream[:, -1])


class _Layer(nn.Module):
    def __init__(self, behind: nn.Module, *, outside: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.behind, self.outside = behind, outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attn(x, x, x, need_weights=False)[0]
        return y if self.outside else self.behind(x + y)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Layers(nn.LayerNorm(8)), "must have a residual stream that is the sum of what is written"),
        (Layers(nn.Identity(), outside=True), "The stream must pass through the layers"),
    ],
    ids=["a norm after each layer", "a sum outside of the layers"],
)
def test_a_plain_module_whose_stream_is_no_sum_is_refused(module: nn.Module, reason: str):
    with pytest.raises(ValueError, match=f"^(model )?{reason}"):
        attribute_edges(hook_module(module, task=TASK), n_prompts=4)


def test_a_layer_without_norms_is_a_sum():
    found = attribute_edges(hook_module(Layers(nn.Identity()), task=TASK), n_prompts=4)
    assert np.isfinite(found.patched).sum() == 3 * 2 * 2


def test_rank_correlation():
    assert rank_correlation(
        np.array([1.0, 5, 2, 9]), np.array([0.1, 0.3, 0.2, 7])
    ) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert np.isnan(rank_correlation(np.zeros(3), np.arange(3.0)))
    # Equal values share a rank: heads without an effect are in no order.
    assert rank_correlation(np.array([0.0, 0, 1]), np.array([0.0, 0, 1])) == pytest.approx(1)
    assert rank_correlation(np.array([0.0, 0, 1]), np.array([0.0, 1, 2])) == pytest.approx(
        0.866, abs=1e-3
    )


@pytest.mark.slow
def test_result():
    found = attribute_edges(random_model(3, 2, **WIDE), drawn(1), drawn(2))
    frame = found.to_frame()
    assert list(frame.columns) == [
        *("input", "layer", "head", "later_layer", "later_head"),
        *("estimate", "estimate_sem", "patched", "patched_sem"),
    ]
    assert len(frame) == 36
    assert (frame["layer"] < frame["later_layer"]).all()
    assert frame["patched"].abs().is_monotonic_decreasing
    top = frame.iloc[0]
    name = f"L{top['layer']}H{top['head']} to {top['input']} of L{top.later_layer}H{top.later_head}"
    assert repr(found).startswith(f"HeadEdges({name} {top.patched:+.3g} ± ")
    place = (COMPONENTS.index(top["input"]), *top[["layer", "head", "later_layer", "later_head"]])
    assert found.patched[place] == found.plot().data[1].y[0] == top.patched


def test_what_has_no_edges_is_refused():
    with pytest.raises(ValueError, match=r"^ig_steps must be >= 1, got 0"):
        attribute_edges(random_model(2, 2), ig_steps=0)
    with pytest.raises(
        ValueError, match=r"^model must have at least 2 layers to have edges betwee"
    ):
        attribute_edges(random_model(1, 2))
    with pytest.raises(ValueError, match=r"^model must have a residual stream that is the sum"):
        attribute_edges(random_model(2, 2, d_model=8, d_head=4, norm="after"))
    with pytest.raises(
        ValueError, match=r"must have the same shape, with at least 2 prompts, got \[3"
    ):
        attribute_edges(random_model(2, 2), drawn(1), drawn(2, 2))
    with pytest.raises(ValueError, match=r"^prompts must be >= 2, .*, got 1\.$"):
        attribute_edges(random_model(2, 2), drawn(1, 1), drawn(2, 1))
