"""TransformerLens' tools on a hooked model: patching, attribution, circuits, head detection.

Where a result can be computed in a second way, the two are compared.
"""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix, SVDInterpreter, patching
from transformer_lens.head_detector import detect_head
from transformer_lens.tools.analysis import attribution_patching
from transformer_lens.tools.analysis.projection_kernel import attention_head_subspace_affinity
from transformer_lens.utilities import composition_scores, get_act_name

from mechinterp.models.hooked.transformer import ICLTransformer
from tests.conformance.conftest import (
    assert_close,
    replace_at,
    require_sum,
    sample_inputs,
    switched_on,
)
from tests.conftest import CHECKPOINTS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BY_POSITION = ("layer", "pos")
BY_HEAD = ("layer", "head")
BY_POSITION_AND_HEAD = ("layer", "pos", "head")
# Name after get_act_patch_, activation, axes; the axes of patterns are [batch, head, query, key].
HEAD_PARTS = (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v"))
SWEEPS = (
    *((name, name, BY_POSITION) for name in ("resid_pre", "resid_mid", "attn_out", "mlp_out")),
    *((f"attn_head_{name}_by_pos", part, BY_POSITION_AND_HEAD) for name, part in HEAD_PARTS),
    ("attn_head_pattern_by_pos", "pattern", ("layer", "head_index", "dest_pos")),
    ("attn_head_pattern_dest_src_pos", "pattern", ("layer", "head_index", "dest_pos", "src_pos")),
    *((f"attn_head_{name}_all_pos", part, BY_HEAD) for name, part in HEAD_PARTS),
    ("attn_head_pattern_all_pos", "pattern", ("layer", "head_index")),
)
KINDS = (
    ("block", 3, BY_POSITION),
    ("attn_head_all_pos", 5, BY_HEAD),
    ("attn_head_by_pos", 5, BY_POSITION_AND_HEAD),
)


def query_output(logits: Float[Tensor, "batch pos d_out"]) -> Float[Tensor, ""]:
    """Metric of all tests: mean first output at the last position."""
    return logits[:, -1, 0].mean()


@pytest.mark.parametrize(("name", "activation", "axes"), SWEEPS, ids=[name for name, *_ in SWEEPS])
def test_a_sweep_is_patching_by_hand(
    model: ICLTransformer, name: str, activation: str, axes: tuple
):
    """Only the first and the last index of the sweep are run, and the last is compared."""
    clean, corrupted = sample_inputs(model)
    sweep, n_heads = getattr(patching, f"get_act_patch_{name}"), model.cfg.n_heads
    sizes = {"layer": model.cfg.n_layers, "head": n_heads, "head_index": n_heads}
    ranges = [sizes.get(axis, clean.shape[1]) for axis in axes]
    indices = patching.make_df_from_ranges(ranges, list(axes)).iloc[[0, -1]]
    last = tuple(size - 1 for size in ranges)
    all_positions = (slice(None),) if axes == BY_HEAD else ()
    hook_name = get_act_name(activation, last[0])
    with switched_on(model, "use_zero_mlp"), torch.no_grad():
        _, cache = model.run_with_cache(clean)
        hook = replace_at((slice(None), *all_positions, *last[1:]), cache[hook_name])
        asked = {"index_axis_names": None, "index_df": indices}
        values = sweep(model, corrupted, cache, query_output, **asked)
        by_hand = query_output(model.run_with_hooks(corrupted, fwd_hooks=[(hook_name, hook)]))
    assert len(values) == len(indices)
    assert_close(values[-1], by_hand)


@pytest.mark.parametrize(("name", "n_kinds", "axes"), KINDS, ids=[name for name, *_ in KINDS])
def test_sweeps_of_all_kinds_have_a_column_for_each_position(
    model: ICLTransformer, name: str, n_kinds: int, axes: tuple
):
    few = 4  # differs from every d_model, so that swapped axes are noticed
    clean, corrupted = (inputs[:, :few] for inputs in sample_inputs(model))
    cfg = model.cfg
    sizes = {"layer": cfg.n_layers, "pos": few, "head": cfg.n_heads}
    with (
        switched_on(model, "use_zero_mlp"),
        model.numbered(clean, corrupted) as (clean_ids, corrupted_ids),
        torch.no_grad(),
    ):
        _, cache = model.run_with_cache(clean_ids)
        sweep = getattr(patching, f"get_act_patch_{name}_every")
        values = sweep(model, corrupted_ids, cache, query_output)
    assert list(values.shape) == [n_kinds, *(sizes[axis] for axis in axes)]
    assert torch.isfinite(values).all()


def test_a_direct_path_is_an_edit_of_the_later_head(model: ICLTransformer):
    require_sum(model)
    clean, corrupted = sample_inputs(model)
    n_layers, head = model.cfg.n_layers, model.cfg.n_heads - 1
    for component in "qkv":
        with torch.no_grad():
            before, after = (model.run_with_cache(inputs)[1] for inputs in (corrupted, clean))
            paths = patching.get_act_patch_direct_path_all_sources(
                model, corrupted, after, before, query_output, component, verbose=False
            )
            assert list(paths.shape) == [n_layers, model.cfg.n_heads] * 2
            if n_layers == 1:
                continue
            write = (after["z", 0] - before["z", 0])[:, :, 0] @ model.blocks[0].attn.W_O[0]
            block, resid = model.blocks[n_layers - 1], before["resid_pre", n_layers - 1]
            norm = getattr(block, "ln1", nn.Identity())
            weights = getattr(block.attn, f"W_{component.upper()}")[head]
            name = get_act_name(component, n_layers - 1)
            moved = before[name].clone()
            moved[:, :, head] += (norm(resid + write) - norm(resid)) @ weights
            hook = replace_at((slice(None), slice(None), head), moved)
            by_hand = query_output(model.run_with_hooks(corrupted, fwd_hooks=[(name, hook)]))
            assert_close(paths[0, 0, -1, head], by_hand)


def test_the_score_of_a_head_is_its_gradient_times_the_change_of_its_z(model: ICLTransformer):
    clean, corrupted = (inputs[:1] for inputs in sample_inputs(model))
    last = model.cfg.n_layers - 1
    with switched_on(model, "use_zero_mlp"), model.numbered(clean, corrupted) as (a, b):
        scores = attribution_patching.attribution_patch(model, a, b, query_output).node_scores
    nodes = [n for n in scores if n.kind == "attn_head_out" and (n.layer, n.head) == (last, 0)]
    name = get_act_name("z", last)
    after, before = (model.run_with_cache(inputs)[1][name] for inputs in (clean, corrupted))
    z = before.detach().requires_grad_()
    held = [(name, lambda values, hook: z)]
    metric = query_output(model.run_with_hooks(corrupted, fwd_hooks=held))
    (gradient,) = torch.autograd.grad(metric, z)
    expected = ((after - before) * gradient)[0, :, 0].sum()
    assert_close(expected.new_tensor(sum(scores[node] for node in nodes)), expected)
    assert expected != 0


def test_edges_add_up_to_nodes_and_all_of_them_are_the_whole_circuit(model: ICLTransformer):
    require_sum(model)
    clean, corrupted = (inputs[:1] for inputs in sample_inputs(model))
    config = attribution_patching.EdgeAttributionConfig(granularity="edge")
    with switched_on(model, "use_zero_mlp"), model.numbered(clean, corrupted) as (a, b):
        sweep = partial(attribution_patching.attribution_patch, model, a, b, query_output)
        nodes, by_edge = sweep().node_scores, sweep(config)
        run = partial(attribution_patching.faithfulness, model, a, b, query_output)
        recovered = [run(circuit).recovered for circuit in (list(by_edge.edge_scores), [])]
    assert any(by_edge.edge_scores.values())
    assert by_edge.node_scores == pytest.approx(nodes, abs=1e-3)
    assert recovered == pytest.approx([1, 0], abs=1e-3)


def test_circuits_are_factored_matrices(model: ICLTransformer):
    OV, QK = model.OV, model.QK
    assert isinstance(OV, FactoredMatrix)
    dense = model.W_V @ model.W_O
    assert_close(OV.svd()[1], torch.linalg.svdvals(dense)[..., : OV.mdim])
    assert torch.isfinite(QK.eigenvalues.abs()).all()
    scores = composition_scores(OV, QK)
    assert tuple(scores.shape) == (model.cfg.n_layers, model.cfg.n_heads) * 2
    product = (dense[0, 0] @ QK.AB[-1, -1]).norm() / dense[0, 0].norm() / QK.AB[-1, -1].norm()
    assert_close(scores[0, 0, -1, -1], product)


def test_singular_vectors_and_subspaces_follow_their_definitions(model: ICLTransformer):
    vectors = SVDInterpreter(model).get_singular_vectors("OV", 0, num_vectors=1, head_index=0)
    right = torch.linalg.svd(model.W_V[0, 0] @ model.W_O[0, 0])[2][0]
    assert_close(vectors[:, 0, 0].abs(), (right @ model.W_U).abs())
    for role in "QKV":
        affinity = attention_head_subspace_affinity(
            model, target_role=role, layer_order="all", rank=1
        ).normalized
        written = torch.linalg.svd(model.W_O[0, 0])[2][0]
        read = torch.linalg.svd(getattr(model, f"W_{role}")[0, 0])[0][:, 0]
        assert_close(affinity[0, 0, 0, 0], (written @ read).square())


def test_a_causal_head_is_detected_by_its_own_pattern(model: ICLTransformer):
    inputs = sample_inputs(model)[0][:1]
    _, cache = model.run_with_cache(inputs, remove_batch_dim=True)
    pattern = cache["pattern", 0][0].detach()
    with model.numbered(inputs) as (ids,), torch.no_grad():
        detect_head(model, ids, "previous_token_head")
        if not model.cfg.model.context_only:
            score = detect_head(model, ids, pattern, error_measure="abs")[0, 0]
            assert_close(score, torch.ones_like(score))


def test_examples_of_the_page_run_as_they_say(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CHECKPOINTS.parent)
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/transformer_lens.md").read_text(), re.S)
    names: dict = {}
    exec("\n".join(blocks), names)
    model, clean, cache = (names[name] for name in ("model", "clean", "cache"))
    assert cache["pattern", 0].shape == (64, 2, 41, 41)
    attributed = cache.logit_attrs(names["heads"], tokens=0)[:, :, -1].sum(0)
    torch.testing.assert_close(attributed, model.predict(clean)[:, 0])
    assert not model.cfg.use_zero_mlp
