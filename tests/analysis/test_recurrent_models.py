"""Every analysis of the registry answers for recurrent models, or says in one line why not."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp import classify
from mechinterp.analysis.circuits import circuits
from mechinterp.analysis.one_layer.attention import attention_patterns
from mechinterp.analysis.registry import ANALYSES, run_analysis
from mechinterp.analysis.training.sampler import Chains
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.checkpoints.load import convert
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.config.model import RECURRENT
from mechinterp.models.hooked.runner import masked
from mechinterp.models.run.evaluation import sample_prompts
from mechinterp.training.general.trainer import initial_deep_weights
from mechinterp.training.train import train
from tests.conftest import CHECKPOINTS, assert_same, refused

TASK = TaskConfig(d_x=3, context_length=8)
KINDS = {rule: ModelConfig(n_heads=1, score=rule) for rule in RECURRENT} | {
    "gates by token": ModelConfig(n_heads=2, score="mesa", gates="token"),
    "two layers": ModelConfig(n_layers=2, n_heads=2, d_model=8, score="gated", gates="token"),
}
"""One head of each rule, and larger models."""
OF_LINEAR = {"linear-components", "jump-forecast"}
OF_LAYERS = {"attribute-edges", "circuit-faithfulness"}
REFUSED = dict.fromkeys(KINDS, OF_LINEAR | OF_LAYERS | {"prune", "compare-priors"})
REFUSED["two layers"] = OF_LINEAR | {"compare-priors"}
"""Analyses that do not accept the model, for reasons that hold for attention, too; all others answer."""
N_PROMPTS = {"attribute-edges": 8, "circuit-faithfulness": 8, "response": 1024}
SETTINGS = {
    "response": {"trim": 0.2},  # delta rules that are hardly trained explode on some prompts
    "local-learning-coefficient": {
        "chains": Chains(n_chains=2, n_draws=8, n_warmup=8, n_leapfrog=2)
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """One layer of one head, and two layers of two heads, after a few steps of training."""
    folder, found = tmp_path_factory.mktemp("recurrent"), {}
    for name, model in KINDS.items():
        every = model.predicts_everywhere
        settings = TrainConfig(
            steps=4,
            batch_size=8,
            log_every=2,
            n_eval_prompts=16,
            loss="every" if every else "query",
        )
        found[name] = train(
            ExperimentConfig(TASK, model, settings), out=folder / name.replace(" ", "-")
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_answers_or_says_why_not(name: str, kind: str, models):
    analysis, given = ANALYSES[name], {"settings": SETTINGS.get(name)}
    if analysis.draws_prompts:
        given["n_prompts"] = N_PROMPTS.get(name, 64)
    if name in REFUSED[kind]:
        with refused("got"):
            run_analysis(name, models[kind], **given)
        return
    found = run_analysis(name, models[kind], **given)
    assert len(found.to_frame()) > 0


@pytest.mark.parametrize("kind", REFUSED)
def test_attention_is_the_exact_pattern(kind: str, models):
    """The pattern of the query, its values and W_O give what the head writes at the query."""
    checkpoint = models[kind]
    prompts = sample_prompts(checkpoint, 8)
    _, cache = checkpoint.model.run_with_cache(prompts)
    found = attention_patterns(checkpoint, prompts, shown=8)
    layer, n_heads = checkpoint.config.model.n_layers - 1, checkpoint.config.model.n_heads
    A = torch.from_numpy(found.pattern[:, -n_heads:]).float()
    z = torch.einsum("bhk,bkhv->bhv", A, cache["v", layer][:, : A.shape[2]])
    torch.testing.assert_close(z, cache["z", layer][:, -1], rtol=1e-5, atol=1e-6)


def test_circuits_have_the_gates_of_the_weights(models):
    weights = models["gated_delta"].weights
    found = circuits(weights)
    gate = 1 / (1 + np.exp(-weights.tensors["attn.b_gate"].double().numpy()))
    np.testing.assert_allclose(found.gate, gate, rtol=1e-12)
    frame = found.to_frame()
    assert frame["gate"].item() == pytest.approx(gate.item())
    assert {"gate", "beta"} <= set(frame)
    # Gates that differ from token to token are no number of the head.
    assert not {"gate", "beta"} & set(circuits(models["two layers"].weights).to_frame())


SHIPPED = [
    f"{preset}{drift}-s{seed}"
    for preset in ("gla-h1", "gated-delta-h1", "mesa-h1")
    for drift in ("", "-drift0.95")
    for seed in range(3)
]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_were_trained_to_an_end(name: str):
    checkpoint = load(CHECKPOINTS / name)
    loss = checkpoint.history.groupby("step").eval_loss.first()
    steps = checkpoint.config.train.steps
    assert checkpoint.step == steps == loss.index[-1]
    assert loss.loc[steps // 2] == pytest.approx(loss.iloc[-1], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("gla-h1-s0", "forgetting_gd"),
        ("gla-h1-drift0.95-s0", "forgetting_gd"),
        ("gated-delta-h1-s0", "online_gd"),
    ],
)
def test_shipped_models_are_the_learner_of_their_weights(name: str, label: str):
    """The label, and its alpha: the gate of the weights to 1%."""
    checkpoint = load(CHECKPOINTS / name)
    found = classify(checkpoint)
    assert found.label == label
    alpha = found.algorithm.scalars(label)[1]
    assert alpha == pytest.approx(circuits(checkpoint).gate.item(), rel=0.01)


@pytest.mark.parametrize("rule", RECURRENT)
def test_saved_models_load_as_they_were(rule: str, tmp_path: Path):
    model = ModelConfig(n_heads=2, score=rule, gates="token")
    config = ExperimentConfig(task=TASK, model=model)
    weights = initial_deep_weights(config)
    save(tmp_path / "model", config, weights, step=0)
    loaded = load(tmp_path / "model")
    assert loaded.config == config
    assert_same(loaded.weights, weights)


def test_masks_edit_the_hooked_model(models):
    checkpoint = models["gated_delta"]
    prompts = sample_prompts(checkpoint, 8)
    with masked(checkpoint.model, [(0, 0)]):
        assert not checkpoint.model.predict(prompts).any()
    assert checkpoint.model.predict(prompts).all()


def test_files_and_modules_of_other_kinds_are_refused(models, tmp_path: Path):
    with refused("recurrent"):
        convert(models["gated_delta"], "transformer-lens", tmp_path / "other")
    with refused("recurrent", "gated_delta"):
        models["gated_delta"].model.as_linear_module()
