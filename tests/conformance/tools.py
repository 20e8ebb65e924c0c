"""Checks of TransformerLens' tools on a hooked model: patching, attribution, circuits, head detection.

Where a result can be computed in a second way, the check compares the two.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix, SVDInterpreter, patching
from transformer_lens.head_detector import detect_head
from transformer_lens.tools.analysis import attribution_patching
from transformer_lens.tools.analysis.projection_kernel import attention_head_subspace_affinity
from transformer_lens.utilities import composition_scores, get_act_name

from tests.conformance.requirements import (
    Check,
    Module,
    replace_at,
    require,
    require_close,
    require_sum,
    sample_inputs,
    switched_on,
)

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


def query_output(logits: Float[Tensor, "batch pos d_out"]) -> Float[Tensor, ""]:
    """Metric of all checks: mean first output at the last position."""
    return logits[:, -1, 0].mean()


@contextmanager
def zero_mlp(model: Module) -> Iterator[None]:
    """Context in which an attention-only model fires the hooks of a zero MLP, if it can."""
    can = hasattr(model, "set_use_zero_mlp")
    with switched_on(model, "use_zero_mlp") if can else nullcontext():
        yield


@contextmanager
def stand_in_ids(model: Module, *inputs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Context with token numbers in place of the inputs, if the model supports them; else the inputs themselves."""
    with model.numbered(*inputs) if hasattr(model, "numbered") else nullcontext(inputs) as ids:
        yield ids


def patches(model: Module, *, name: str, activation: str, axes: tuple[str, ...]) -> None:
    """A sweep agrees with patching by hand at its last index; only its first and last index are run."""
    clean, corrupted = sample_inputs(model)
    sweep = getattr(patching, f"get_act_patch_{name}")
    n_heads = model.cfg.n_heads
    sizes = {"layer": model.cfg.n_layers, "head": n_heads, "head_index": n_heads}
    ranges = [sizes.get(axis, clean.shape[1]) for axis in axes]
    indices = patching.make_df_from_ranges(ranges, list(axes)).iloc[[0, -1]]
    last = tuple(size - 1 for size in ranges)
    all_positions = (slice(None),) if axes == BY_HEAD else ()
    hook_name = get_act_name(activation, last[0])
    with zero_mlp(model), torch.no_grad():
        _, cache = model.run_with_cache(clean)
        hook = replace_at((slice(None), *all_positions, *last[1:]), cache[hook_name])
        asked = {"index_axis_names": None, "index_df": indices}
        values = sweep(model, corrupted, cache, query_output, **asked)
        by_hand = query_output(model.run_with_hooks(corrupted, fwd_hooks=[(hook_name, hook)]))
    require(len(values) == len(indices), f"{len(values)} values for {len(indices)} indices")
    require_close(values[-1], by_hand, f"the last of {len(values)} patches, done by hand")


def counts_positions(model: Module) -> None:
    """Sweeps that count positions themselves have one column per position."""
    clean, corrupted = sample_inputs(model)
    expected = [model.cfg.n_layers, clean.shape[1]]
    with stand_in_ids(model, clean, corrupted) as (clean_ids, corrupted_ids), torch.no_grad():
        _, cache = model.run_with_cache(clean_ids)
        try:
            sweep = patching.get_act_patch_resid_pre
            shape = list(sweep(model, corrupted_ids, cache, query_output).shape)
        except IndexError:
            shape = [model.cfg.n_layers, corrupted_ids.shape[-1]]
    reason = "TransformerLens counts them on the input's last axis; give it index_df"
    require(shape == expected, f"{shape[1]} columns for {expected[1]} positions: {reason}")


def patches_every(model: Module, *, name: str, n_kinds: int, axes: tuple[str, ...]) -> None:
    """A sweep of TransformerLens over several kinds of activation runs; few positions suffice."""
    few = 6 if model.cfg.d_model == 5 else 5  # differs from d_model: swapped axes are noticed
    clean, corrupted = (inputs[:, :few] for inputs in sample_inputs(model))
    cfg = model.cfg
    sizes = {"layer": cfg.n_layers, "pos": clean.shape[1], "head": cfg.n_heads}
    expected = [n_kinds, *(sizes[axis] for axis in axes)]
    with (
        zero_mlp(model),
        stand_in_ids(model, clean, corrupted) as (clean_ids, corrupted_ids),
        torch.no_grad(),
    ):
        _, cache = model.run_with_cache(clean_ids)
        sweep = getattr(patching, f"get_act_patch_{name}_every")
        values = sweep(model, corrupted_ids, cache, query_output)
    require(list(values.shape) == expected, f"shape {list(values.shape)} instead of {expected}")
    require(bool(torch.isfinite(values).all()), "a value is not finite")


def patches_direct_paths(model: Module) -> None:
    """Patching the path from a head into one later head agrees with an edit of that head by hand."""
    require_sum(model)
    clean, corrupted = sample_inputs(model)
    n_layers, head = model.cfg.n_layers, model.cfg.n_heads - 1
    components: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")
    for component in components:
        with torch.no_grad():
            before, after = (model.run_with_cache(inputs)[1] for inputs in (corrupted, clean))
            paths = patching.get_act_patch_direct_path_all_sources(
                model, corrupted, after, before, query_output, component, verbose=False
            )
            if n_layers > 1:
                write = (after["z", 0] - before["z", 0])[:, :, 0] @ model.blocks[0].attn.W_O[0]
                block, resid = model.blocks[n_layers - 1], before["resid_pre", n_layers - 1]
                norm = getattr(block, "ln1", nn.Identity())
                weights = getattr(block.attn, f"W_{component.upper()}")[head]
                name = get_act_name(component, n_layers - 1)
                moved = before[name].clone()
                moved[:, :, head] += (norm(resid + write) - norm(resid)) @ weights
                hook = replace_at((slice(None), slice(None), head), moved)
                by_hand = query_output(model.run_with_hooks(corrupted, fwd_hooks=[(name, hook)]))
                path = paths[0, 0, -1, head]
                require_close(path, by_hand, f"the path into {component} of the last head, by hand")
        shape = [n_layers, model.cfg.n_heads] * 2
        require(list(paths.shape) == shape, f"shape {list(paths.shape)} instead of {shape}")


def attributes_to_nodes(model: Module) -> None:
    """The score of a head is the first-order change of the metric when its z changes (gradient times change)."""
    clean, corrupted = (inputs[:1] for inputs in sample_inputs(model))
    last = model.cfg.n_layers - 1
    with zero_mlp(model), stand_in_ids(model, clean, corrupted) as (a, b):
        scores = attribution_patching.attribution_patch(model, a, b, query_output).node_scores
    nodes = [n for n in scores if n.kind == "attn_head_out" and (n.layer, n.head) == (last, 0)]
    name = get_act_name("z", last)
    after, before = (model.run_with_cache(inputs)[1][name] for inputs in (clean, corrupted))
    z = before.detach().requires_grad_()
    held = [(name, lambda values, hook: z)]
    metric = query_output(model.run_with_hooks(corrupted, fwd_hooks=held))
    (gradient,) = torch.autograd.grad(metric, z)
    expected = ((after - before) * gradient)[0, :, 0].sum()
    score = expected.new_tensor(sum(scores[node] for node in nodes))
    require_close(score, expected, "the last head")
    require(any(scores.values()), "no node has an effect")


def attributes_to_edges(model: Module) -> None:
    """The edge scores of a node sum to the score of the node."""
    require_sum(model)
    clean, corrupted = (inputs[:1] for inputs in sample_inputs(model))
    config = attribution_patching.EdgeAttributionConfig(granularity="edge")
    with zero_mlp(model), stand_in_ids(model, clean, corrupted) as (a, b):
        sweep = partial(attribution_patching.attribution_patch, model, a, b, query_output)
        nodes, by_edge = sweep().node_scores, sweep(config)
    edges = by_edge.edge_scores
    require(len(set(by_edge.node_scores) ^ set(nodes)) == 0, "edges and nodes name other writers")
    off = max(abs(by_edge.node_scores[node] - nodes[node]) for node in nodes)
    require(off < 1e-3, f"edge scores add up to node scores up to {off:.2g}")
    require(any(edges.values()), "no edge has an effect")


def measures_faithfulness(model: Module) -> None:
    """The circuit of all edges recovers the clean metric, the empty circuit the corrupted metric."""
    require_sum(model)
    clean, corrupted = (inputs[:1] for inputs in sample_inputs(model))
    config = attribution_patching.EdgeAttributionConfig(granularity="edge")
    with zero_mlp(model), stand_in_ids(model, clean, corrupted) as (a, b):
        run = partial(attribution_patching.faithfulness, model, a, b, query_output)
        scores = attribution_patching.attribution_patch(model, a, b, query_output, config)
        edges = list(scores.edge_scores)
        for circuit, recovered in ((edges, 1.0), ([], 0.0)):
            recovery = run(circuit).recovered
            reason = f"{len(circuit)} of {len(edges)} edges recover {recovery:.3g} of the metric"
            require(abs(recovery - recovered) < 1e-3, reason)


def has_factored_circuits(model: Module) -> None:
    """QK and OV are FactoredMatrix objects with the right singular values and composition scores."""
    OV, QK = model.OV, model.QK
    require(isinstance(OV, FactoredMatrix), f"model.OV is a {type(OV).__name__}")
    dense = model.W_V @ model.W_O
    require_close(OV.svd()[1], torch.linalg.svdvals(dense)[..., : OV.mdim], "singular values of OV")
    require(bool(torch.isfinite(QK.eigenvalues.abs()).all()), "eigenvalues of QK")
    axes = (model.cfg.n_layers, model.cfg.n_heads)
    scores = composition_scores(OV, QK)
    require(tuple(scores.shape) == axes * 2, f"composition scores have shape {list(scores.shape)}")
    product = (dense[0, 0] @ QK.AB[-1, -1]).norm() / dense[0, 0].norm() / QK.AB[-1, -1].norm()
    require_close(scores[0, 0, -1, -1], product, "the composition score of the first and last head")


def interprets_by_svd(model: Module) -> None:
    """SVDInterpreter gives the first singular vector of an OV circuit."""
    vectors = SVDInterpreter(model).get_singular_vectors("OV", 0, num_vectors=1, head_index=0)
    right = torch.linalg.svd(model.W_V[0, 0] @ model.W_O[0, 0])[2][0]
    require_close(vectors[:, 0, 0].abs(), (right @ model.W_U).abs(), "the first singular vector")


def compares_subspaces(model: Module) -> None:
    """Subspace affinity between heads agrees with its definition."""
    for role in "QKV":
        affinity = attention_head_subspace_affinity(
            model, target_role=role, layer_order="all", rank=1
        ).normalized
        written = torch.linalg.svd(model.W_O[0, 0])[2][0]
        read = torch.linalg.svd(getattr(model, f"W_{role}")[0, 0])[0][:, 0]
        expected = (written @ read).square()
        require_close(affinity[0, 0, 0, 0], expected, f"the affinity of O and {role}")


def detects_heads(model: Module) -> None:
    """A causal head scores 1 on its own pattern; the detector needs causal patterns."""
    detect: Callable[..., Tensor] = detect_head  # annotated for text, but takes numbers too
    inputs = sample_inputs(model)[0][:1]
    _, cache = model.run_with_cache(inputs, remove_batch_dim=True)
    pattern = cache["pattern", 0][0].detach()
    causal = not getattr(getattr(model.cfg, "model", model.cfg), "context_only", False)
    with stand_in_ids(model, inputs) as (ids,), torch.no_grad():
        detect(model, ids, "previous_token_head")
        if not causal:
            return
        score = detect(model, ids, pattern, error_measure="abs")[0, 0]
    require_close(score, torch.ones_like(score), "the score of a head on its own pattern")


CHECKS: dict[str, Check] = {
    **{
        f"patching: {name}": partial(patches, name=name, activation=activation, axes=axes)
        for name, activation, axes in SWEEPS
    },
    "patching: position count": counts_positions,
    **{
        f"patching: {name}_every": partial(patches_every, name=name, n_kinds=n_kinds, axes=axes)
        for name, n_kinds, axes in (
            ("block", 3, BY_POSITION),
            ("attn_head_all_pos", 5, BY_HEAD),
            ("attn_head_by_pos", 5, BY_POSITION_AND_HEAD),
        )
    },
    "patching: direct paths": patches_direct_paths,
    "attribution patching: nodes": attributes_to_nodes,
    "attribution patching: edges": attributes_to_edges,
    "faithfulness": measures_faithfulness,
    "FactoredMatrix: SVD, composition": has_factored_circuits,
    "SVDInterpreter": interprets_by_svd,
    "subspace affinity": compares_subspaces,
    "head detector": detects_heads,
}
