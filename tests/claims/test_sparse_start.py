"""Training that starts from the published construction keeps it and gets better, if later layers
have other heads to use.

`analyses/sparse/start.py` trains to the end, and a model of the same shape that starts at random
beside it.
"""

from dataclasses import replace

import pytest
import torch

from mechinterp.analysis.probing.linear import preconditioned, probe_layers, reweighted
from mechinterp.checkpoints.checkpoint import load
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import excess_risk
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.general import predict_deep
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from tests.conftest import CHECKPOINTS

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_the_first_steps_keep_what_layer_1_writes_and_lower_the_risk():
    base = load(CHECKPOINTS / "sparse-h8-noise0.1-s0").config
    model = replace(base.model, n_heads=16, d_head=16, d_model=33)
    train = replace(base.train, steps=500, log_every=500, n_eval_prompts=1, data_seed=1000)
    config = replace(base, model=model, train=train)
    built = preprocess_then_optimise_model([0.5] * 3, d_x=16).to(torch.float32)
    live = (built.W_V @ built.W_O).flatten(2).any(-1)[..., None, None]
    drawn = initial_deep_weights(config)
    start = built.with_tensors(
        {
            name: torch.where(live, built.tensors[name], tensor / 2)
            for name, tensor in drawn.tensors.items()
            if name.startswith("attn.")
        }
    )
    run = DeepRun({"": config}, start=start)
    run.advance()
    assert run.finished
    (found,) = run.results().values()
    prompts = sample_prompts(base.task, 1024, generator=generator_for(1, "eval", 0))
    ends = (start, found.weights)
    before, after = (excess_risk(predict_deep(w, prompts), prompts) for w in ends)
    assert after.mean() < 0.6 * before.mean()
    hooked = ICLTransformer.from_weights(found.weights, task=base.task)
    assert probe_layers(hooked, prompts, target=reweighted).r2[1, -1] > 0.98
    assert probe_layers(hooked, prompts, target=preconditioned).r2[1, -1] < 0.1
