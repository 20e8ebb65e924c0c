"""Edges of a model: estimates as TransformerLens makes them, patches as one makes them by hand."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformer_lens import ActivationCache
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    Node,
    attribution_patch,
)

from mechinterp.analysis.patching.edges import EdgeEffects, attribute_edges
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


def named(node: Node) -> str:
    """Our name of TransformerLens' node."""
    if node.kind in ("embed", "logits"):
        return {"embed": "input", "logits": "output"}[node.kind]
    if node.kind.startswith("mlp"):
        return f"L{node.layer}MLP"
    part = "" if node.kind == "attn_head_out" else f".{node.kind[0]}"
    return f"L{node.layer}H{node.head}{part}"


@pytest.mark.slow
def test_estimates_at_one_point_are_transformer_lens(model: ICLTransformer):
    clean, corrupted = drawn(1), drawn(2)
    found = attribute_edges(
        model, clean, corrupted, nodes="all", ig_steps=1, metric=first_prediction
    )
    places = {
        (one, two): (i, j)
        for (i, one), (j, two) in product(enumerate(found.senders), enumerate(found.receivers))
    }
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
            # TransformerLens has MLPs in every model; those of zeros are not in our graph.
            if (named(writer), named(reader)) in places:
                expected[row][places[named(writer), named(reader)]] += score
    edges = np.isfinite(found.estimate)
    n_mlps = 0 if model.cfg.attn_only else 3
    from_heads_and_input = 3 * 2 * (1 + 3 + 5) + 7 + n_mlps * (1 + 4)
    from_mlps = n_mlps and 3 * 2 * (1 + 2) + (1 + 2) + 3
    assert edges.sum() == from_heads_and_input + from_mlps
    largest = np.abs(expected).max()
    assert largest > 0
    np.testing.assert_allclose(found.estimate[edges], expected.mean(0)[edges], atol=1e-9 * largest)
    sem = expected.std(axis=0, ddof=1)[edges] / 3**0.5
    np.testing.assert_allclose(found.estimate_sem[edges], sem, atol=1e-9 * largest)
    between = attribute_edges(model, clean, corrupted, metric=first_prediction)
    assert np.isfinite(between.estimate).sum() == 3 * 3 * 4
    for sender, receiver in between.to_frame()[["from", "to"]].to_numpy():
        assert effect(between, sender, receiver) == pytest.approx(effect(found, sender, receiver))


def effect(found: EdgeEffects, sender: str, receiver: str, name: str = "patched") -> float:
    return getattr(found, name)[found.senders.index(sender), found.receivers.index(receiver)]


def patched_by_hand(
    model: ICLTransformer, clean: Prompts, corrupted: Prompts, sender: str, receiver: str
) -> torch.Tensor:
    """The prediction when one node reads what an earlier one writes on the clean prompts: its normed input is made by
    hand, and what it computes from that is put in."""

    def written(cache: ActivationCache) -> torch.Tensor:
        layer = int(sender[1]) if sender != "input" else 0
        if sender == "input":
            return cache["resid_pre", 0]
        if sender.endswith("MLP"):
            return cache["mlp_out", layer]
        return (
            cache["z", layer][:, :, int(sender[3:])] @ model.blocks[layer].attn.W_O[int(sender[3:])]
        )

    with torch.no_grad():
        caches = [model.run_with_cache(model.tokens(p))[1] for p in (clean, corrupted)]
        more = written(caches[0]) - written(caches[1])
        norm = "ln_final" if receiver == "output" else "ln2" if receiver.endswith("MLP") else "ln1"
        layer = 2 if receiver == "output" else int(receiver[1])
        holder = model if receiver == "output" else model.blocks[layer]
        normed = getattr(holder, norm) if model.cfg.model.norm else nn.Identity()
        if receiver == "output":
            return model.unembed(normed(caches[1]["resid_post", layer] + more))[:, -1, 0]
        if receiver.endswith("MLP"):
            put = model.blocks[layer].mlp(normed(caches[1]["resid_mid", layer] + more))
            name, head = f"blocks.{layer}.hook_mlp_out", slice(None)
        else:
            head, part = int(receiver[3]), receiver[-1]
            moved = normed(caches[1]["resid_pre", layer] + more)
            put = moved @ getattr(model.blocks[layer].attn, f"W_{part.upper()}")[head]
            name = f"blocks.{layer}.attn.hook_{part}"

        def replaced(values: torch.Tensor, hook: object) -> torch.Tensor:
            values = values.clone()
            values[:, :, head] = put
            return values

        return model.run_with_hooks(model.tokens(corrupted), fwd_hooks=[(name, replaced)])[:, -1, 0]


HAND_EDGES = [
    *[("L0H0", "L1H0.q"), ("L0H0", "L2H1.k"), ("L1H1", "L2H0.v"), ("L0H1", "L1H1.v")],
    *[("input", "L0H1.k"), ("input", "L2H0.v"), ("L1H0", "output"), ("input", "output")],
    *[("L0H1", "L0MLP"), ("input", "L1MLP"), ("L0MLP", "L2MLP"), ("L1MLP", "L2H0.q")],
    ("L2MLP", "output"),
]


@pytest.mark.slow
def test_patches_are_those_by_hand_and_leave_the_model_as_it_was(model: ICLTransformer):
    clean, corrupted = drawn(1), drawn(2)
    found = attribute_edges(
        model, clean, corrupted, nodes="all", ig_steps=2, metric=first_prediction
    )
    before = model.predict(corrupted)[:, 0].detach()
    edges = [edge for edge in HAND_EDGES if not model.cfg.attn_only or "MLP" not in "".join(edge)]
    for edge in edges:
        change = patched_by_hand(model, clean, corrupted, *edge) - before
        # The input has no y at the query: without a read-in the output reads nothing of it.
        assert change.abs().max() > 0 or edge == ("input", "output")
        assert effect(found, *edge) == pytest.approx(change.mean().item(), rel=1e-8, abs=1e-12)
        sem = change.std().item() / 3**0.5
        assert effect(found, *edge, "patched_sem") == pytest.approx(sem, rel=1e-8, abs=1e-12)
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
    assert effect(found, "L0H1", "L1H0.v", "estimate") == pytest.approx(
        expected.mean().item(), rel=1e-9
    )


@pytest.mark.slow
def test_the_metric_by_default_is_nearness_to_the_clean_prediction():
    model, clean, corrupted = random_model(2, 2), drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted)
    gap = (model.predict(clean) - model.predict(corrupted)).detach()
    assert found.total == pytest.approx(gap.square().sum(1).mean().item())
    moved = patched_by_hand(model, clean, corrupted, "L0H0", "L1H0.v")
    change = gap[:, 0].square() - (model.predict(clean)[:, 0].detach() - moved).square()
    assert effect(found, "L0H0", "L1H0.v") == pytest.approx(change.mean().item(), rel=1e-8)


@pytest.mark.slow
def test_a_model_of_somebody_else_has_edges_too():
    found = attribute_edges(random_gpt2(), drawn(1), drawn(2), metric=first_prediction)
    assert np.isfinite(found.patched).sum() == 3 * 3 * 4
    assert found.rank_correlation > 0.5
    # Three MLPs: 3 * 2 * (1 + 2) edges to heads, 3 to later MLPs and 3 to the output, beside 3 * 5 to MLPs.
    whole = attribute_edges(random_gpt2(), drawn(1), drawn(2), nodes="all", metric=first_prediction)
    assert np.isfinite(whole.patched).sum() == 3 * 2 * (1 + 3 + 5) + 7 + 15 + 18 + 3 + 3
    assert effect(whole, "L0H1", "L2H0.k") == pytest.approx(effect(found, "L0H1", "L2H0.k"))


@pytest.mark.slow
def test_estimates_rank_edges_as_patches_do():
    """Where the second layer is linear in its values, those edges are estimated without error."""
    model, clean, corrupted = random_model(2, 3, **WIDE, score="linear/L"), drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted, ig_steps=1, metric=first_prediction)
    values = [index for index, name in enumerate(found.receivers) if name.endswith(".v")]
    assert len(values) == 3
    np.testing.assert_allclose(found.estimate[:, values], found.patched[:, values], rtol=1e-8)
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
        *("from", "to"),
        *("estimate", "estimate_sem", "patched", "patched_sem"),
    ]
    assert len(frame) == 36
    assert (frame["from"].str[1] < frame["to"].str[1]).all()
    assert frame["patched"].abs().is_monotonic_decreasing
    top = frame.iloc[0]
    name = f"{top['from']} to {top['to']}"
    assert repr(found).startswith(f"EdgeEffects({name} {top.patched:+.3g} ± ")
    assert effect(found, top["from"], top["to"]) == found.plot().data[1].y[0] == top.patched


@pytest.mark.slow
def test_one_layer_has_edges_from_the_input_and_to_the_output():
    """The output is linear in what is written: its edges add up to the whole change of the prediction."""
    model, clean, corrupted = random_model(1, 2), drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted, nodes="all", metric=first_prediction)
    assert found.senders == ("input", "L0H0", "L0H1")
    assert np.isfinite(found.patched).sum() == 3 * 2 + 3
    to_output = found.patched[:, found.receivers.index("output")]
    assert to_output.sum() == pytest.approx(found.total, rel=1e-9)


def test_what_has_no_edges_is_refused():
    with pytest.raises(ValueError, match=r"^nodes must be one of heads, all, got 'mlps'"):
        attribute_edges(random_model(2, 2), nodes="mlps")
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
