"""Configs: a trip through JSON changes nothing, and nothing that cannot be done is accepted."""

import copy
import json
import math
import pickle
import re
from dataclasses import asdict, fields, replace

import numpy as np
import pytest

from mechinterp.config import (
    CovarianceConfig,
    ExperimentConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
    differences,
    from_dict,
    override,
)
from mechinterp.presets import PRESETS, preset
from tests.conftest import refused


@pytest.mark.parametrize("name", PRESETS)
def test_a_trip_through_json_changes_nothing(name: str):
    uneven = {"model.score_slope": 0.1 + 0.2, "train.learning_rate": 1e-7 / 3, "seed": 2**63}
    config = override(preset(name), *(f"{field}={value!r}" for field, value in uneven.items()))
    back = ExperimentConfig.from_json(config.to_json())
    assert back == config
    assert back.to_json() == config.to_json()
    assert back.id == config.id
    assert differences(config, back) == {}


def test_the_id_is_stable():
    # Folders and histories carry ids, so a new version of the package must not change them.
    assert ExperimentConfig().id == "5926da76"


def test_configs_that_differ_have_different_ids():
    # The last two enter the id only where they are set.
    together = 'model={"context_only": true, "n_heads": 3}'
    changes = ["seed=1", "task.d_x=6", "model.biases=true", together]
    ids = {override(ExperimentConfig(), change).id for change in changes}
    assert len(ids | {ExperimentConfig().id}) == len(changes) + 1


def test_numbers_are_brought_into_one_form():
    plain = ExperimentConfig(task=TaskConfig(noise_var=0.0, d_x=3))
    for noise_var, d_x in ((0, 3), (np.float64(0), np.int64(3)), (np.float32(0), 3)):
        config = from_dict({"task": {"noise_var": noise_var, "d_x": d_x}})
        assert config.id == plain.id
        assert type(config.task.noise_var) is float
        assert type(config.task.d_x) is int
    eigenvalues = {"kind": "eigenvalues", "eigenvalues": [1, 2, 3]}
    config = from_dict({"task": {"d_x": 3, "covariance": eigenvalues}})
    assert config.task.covariance.eigenvalues == (1.0, 2.0, 3.0)
    assert all(type(value) is float for value in config.task.covariance.eigenvalues)


def test_derived_numbers_follow_their_fields():
    config = override(ExperimentConfig(), "task.d_x=8", "task.d_y=2")
    assert (config.d_model, config.d_head) == (10, 10)
    assert override(config, "model.d_head=3").d_head == 3
    assert config.task.beta_variance == 1 / 8
    assert config.task.signal_var == 1
    assert override(config, "task.beta_var=1").task.signal_var == 8
    covariance = CovarianceConfig(kind="eigenvalues", eigenvalues=(1.0, 2.0, 4.0))
    assert TaskConfig(d_x=3, covariance=covariance, beta_var=2.0).signal_var == 14
    kms = TaskConfig(d_x=4, covariance=CovarianceConfig(kind="kms", rho=0.5))
    assert kms.signal_var == 1


def test_a_task_in_words_has_every_field_with_the_number_of_its_default():
    assert TaskConfig().assuming(()).in_words == (
        "d_x 5, d_y 1, context_length 40, covariance identity, beta_var 0.2 (1/d_x), noise_var 0.1, query_noise yes"
    )
    # Without noise it does not matter whether the query has some.
    free = TaskConfig(noise_var=0, query_noise=False).assuming(["covariance", "query_noise"])
    assert free.in_words.endswith("noise_var 0; assumed: covariance")
    kms = CovarianceConfig("kms", rho=0.5)
    words = TaskConfig(d_x=16, sparsity=4, nonzeros="signs", covariance=kms).fields_in_words
    assert (words["beta_var"], words["covariance"]) == ("0.25 (1/sparsity)", "kms with rho 0.5")


def test_snapshot_steps():
    assert TrainConfig(steps=100).snapshot_steps == (0,)
    assert TrainConfig(steps=20_000).snapshot_steps == (0, 1000, 2000, 5000, 10_000, 20_000)
    assert TrainConfig().snapshot_steps[-2:] == (200_000, 500_000)
    assert TrainConfig(steps=10, snapshot_every=4).snapshot_steps == (0, 4, 8)
    assert TrainConfig(steps=8, snapshot_every=4).snapshot_steps == (0, 4, 8)


def test_override_changes_the_named_fields_at_once():
    base = ExperimentConfig()
    changed = override(
        base,
        "task.covariance.kind=eigenvalues",
        "task.covariance.eigenvalues=[1, 2]",
        "task.d_x=2",
        "model.score=1+tanh",
        "train.learning_rate=1",
        "task.query_noise=false",
        "model.d_head=null",
    )
    assert differences(base, changed) == {
        "task.covariance.kind": ("identity", "eigenvalues"),
        "task.covariance.eigenvalues": ((), (1.0, 2.0)),
        "task.d_x": (5, 2),
        "model.score": ("softmax", "1+tanh"),
        "train.learning_rate": (1e-3, 1.0),
        "task.query_noise": (True, False),
    }
    assert base == ExperimentConfig()
    assert override(base) == base
    assert override(base, 'model={"n_heads": 3}').model == ModelConfig(n_heads=3)


@pytest.mark.parametrize(
    ("name", "code_rate", "code_std", "tau"),
    [
        ("linear-merged", 1e-3, 1e-6, 16.129),
        ("linear-separate", 2e-2, 1e-2, 2.5334),
        ("linear-rank-4", 2e-2, 5e-3, 2.5334),
    ],
)
def test_linear_presets_are_the_codes_settings_with_a_mean_for_its_sum(
    name: str, code_rate: float, code_std: float, tau: float
):
    # b of the code is N times ours: with w = N^(1/n) w_code both models predict the same.
    config = preset(name)
    n_factors = 2 if config.model.merged_qk else 3
    assert config.train.init_std**n_factors == pytest.approx(31 * code_std**n_factors)
    assert 1 / (2 * config.train.learning_rate) == pytest.approx(tau, abs=1e-3)
    assert config.train.learning_rate == pytest.approx(code_rate * 31 ** (2 / n_factors))
    assert config.d_head == {"linear-merged": 5, "linear-separate": 1, "linear-rank-4": 4}[name]


NOT_POSITIVE = [
    *(f"task.{name}" for name in ("d_x", "d_y", "context_length", "n_tasks", "n_sequences")),
    *(f"model.{name}" for name in ("n_layers", "n_heads", "d_head", "d_mlp", "n_positions")),
    *(f"train.{name}" for name in ("steps", "batch_size", "log_every", "n_eval_prompts")),
    *(f"train.{name}" for name in ("snapshot_every", "warm_up", "shortest_context")),
]
"""Counts, which must be >= 1."""
REFUSED = {
    **{name: ("0",) for name in NOT_POSITIVE},
    "model.n_heads": ("0", "2.5", "2.0", "true", "abc", "", "null", "[2]", "NaN", "Infinity"),
    "model.d_head": ("0", "x"),
    "model.score": ("3", "relu/L", "relu"),
    "model.score_slope": ("NaN", "1e300", "-1e300"),
    "model.norm": ("batch",),
    "model.norm_eps": ("-1",),
    "model.activation": ("step",),
    "model.layout": ("mixed",),
    "task": ("[]",),
    "task.query_noise": ("1",),
    "task.noise_var": ("true", "NaN", "Infinity", "1e999", "1" + "0" * 400, "-0.1", "1e200"),
    "task.beta_var": ("x", "0", "1e200"),
    "task.covariance.scale": ("0", "1e200"),
    "task.covariance": ("kms",),
    "task.covariance.kind": ("wishart",),
    "task.covariance.rho": ("0.5",),
    "task.covariance.eigenvalues": ("3", '["a"]', "[1, NaN]", "[1, 2]"),
    "task.supports": ("[]", "[[]]", "[[1, 1]]", "[[0, 5]]"),
    "task.sparsity": ("0", "6"),
    "task.nonzeros": ("cauchy", "signs"),
    "task.n_sequences": ("0", "9"),
    "task.task_seed": ("3",),
    "task.n_tasks": ("0", "1048577"),
    "train.shortest_context": ("0", "4"),
    "train.schedule": ("cosine",),
    "train.clip_norm": ("0", "1"),
    "train.warm_up": ("0", "2"),
    "train.data_seed": ("-1",),
    "train.learning_rate": ("0",),
    "train.optimizer": ("sgd",),
    "train.init_std": ("0", "-1", "0.1"),
    "seed": ("-1",),
}
"""Values of single fields of the default config, as text."""
TOGETHER = [
    ("task.covariance.rho", 'task.covariance={"kind": "kms", "rho": 1}'),
    ("task.covariance.eigenvalues", 'task.covariance={"kind": "eigenvalues"}'),
    *(
        ("task.covariance.eigenvalues", f'task.covariance={{"kind": "eigenvalues", {values}}}')
        for values in ('"eigenvalues": [1, 0]', '"eigenvalues": [1, 2]')
    ),
    ("task.sparsity", 'task={"sparsity": 1, "supports": [[0]]}'),
    ("task.beta_var", 'task={"sparsity": 1, "nonzeros": "signs", "beta_var": 1}'),
    ("model.d_model", "model.d_read_in=4"),
    ("model.d_model", "model.layout=in_turn"),
    ("model.d_model", 'model={"context_only": true, "d_model": 0}'),
    ("task.context_length", 'model={"layout": "in_turn", "d_model": 8, "n_positions": 80}'),
    ("task.context_length", "model.n_positions=40"),
    *(
        ("model.n_heads", f'model={{"context_only": true, {sizes}}}')
        for sizes in ('"d_model": 9', '"n_heads": 4')
    ),
    ("model.d_head", 'model={"merged_qk": true, "d_head": 3}'),
]
"""Fields that do not go together, and the one that the refusal names first."""
NOT_IN_MOMENTS = [
    *("model.score=linear", "model.attend_to_self=true", "model.biases=true", "model.d_model=5"),
    *("model.n_layers=2", "model.norm=before", "model.score_slope=0", "task.d_y=2"),
    *("task.noise_var=0.1", "task.supports=[[0, 1]]", "task.n_sequences=9", "task.sparsity=2"),
]
"""Settings that the exact moments of gradient flow do not cover."""
CASES = [
    *((name, "softmax-h2", f"{name}={value}") for name in REFUSED for value in REFUSED[name]),
    *((name, "softmax-h2", assignment) for name, assignment in TOGETHER),
    *((one.partition("=")[0], "linear-merged", one) for one in NOT_IN_MOMENTS),
]


@pytest.mark.parametrize(
    "law",
    [
        {"kind": "eigenvalues", "eigenvalues": (1.0, 1e200)},
        {"kind": "eigenvalues", "eigenvalues": (1.0, 1e20), "scale": 1e20},
        {"kind": "matrix", "matrix": ((1e200, 0.0), (0.0, 1e200))},
    ],
)
def test_variances_of_coordinates_are_bounded(law: dict):
    with refused(f"task.covariance.{law['kind']}", "at most 1e+30"):
        CovarianceConfig(**law)


@pytest.mark.parametrize(
    ("field", "base", "assignment"), CASES, ids=[each[-1][:45] for each in CASES]
)
def test_a_refusal_is_one_line_that_names_field_rule_and_value(
    field: str, base: str, assignment: str
):
    with pytest.raises(ValueError, match=rf"^{re.escape(field)}\S* .+, got .+\.$") as error:
        override(preset(base), assignment)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("model.n_heads", ["field=value", "'model.n_heads'"]),
        ("n_heads=2", ["'n_heads'", "task, model, train, seed"]),
        ("seed.x=2", ["'seed.x'"]),
        *(
            (one, ["'model.heads'", *(f"model.{field.name}" for field in fields(ModelConfig))])
            for one in ("model.heads=2", 'model={"heads": 2}')
        ),
    ],
)
def test_an_unknown_field_is_refused_with_the_known_ones(assignment: str, words: list[str]):
    with refused(*words):
        override(ExperimentConfig(), assignment)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with refused("softmax-h2", "'softmax-h5'"):
        preset("softmax-h5")


def test_a_training_set_is_for_descent():
    descent = override(preset("linear-separate"), "train.optimizer=gradient_descent")
    assert override(descent, "task.n_sequences=9").task.n_sequences == 9


def test_the_shortest_context_is_no_longer_than_the_longest():
    several = override(ExperimentConfig(), "model.context_only=true")
    assert override(several, "train.shortest_context=40").train.shortest_context == 40
    with refused("train.shortest_context", 40, 41):
        override(several, "train.shortest_context=41")


@pytest.mark.parametrize("noise_var", [math.nan, math.inf])
def test_fields_are_checked_when_a_config_is_made_in_python(noise_var: float):
    with refused("task.noise_var", noise_var):
        TaskConfig(noise_var=noise_var)


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", "softmax"])
def test_text_that_is_no_json_object_is_refused(text: str):
    with refused():
        ExperimentConfig.from_json(text)


def test_json_holds_every_field():
    fields_of_json = json.loads(ExperimentConfig().to_json())
    every = json.loads(json.dumps(asdict(ExperimentConfig())))
    covariance = every["task"]["covariance"]
    assert (covariance.pop("scale"), covariance.pop("matrix")) == (
        1,
        [],
    )  # written where they are set
    assert fields_of_json == every
    matrix = TaskConfig(d_x=2, covariance=CovarianceConfig(scale=2))
    assert ExperimentConfig.from_json(ExperimentConfig(task=matrix).to_json()).task == matrix


def test_a_task_remembers_what_was_passed_and_nothing_else_sees_it():
    task = TaskConfig(4, noise_var=0.1)
    assert task.given == {"d_x", "noise_var"}
    assert replace(task, d_y=2).given == {"d_x", "noise_var", "d_y"}
    assert copy.deepcopy(task).assumed == pickle.loads(pickle.dumps(task)).assumed == task.assumed
    same = task.assuming(())
    assert (same, hash(same), repr(same)) == (task, hash(task), repr(task))
    assert ExperimentConfig(task=same).id == ExperimentConfig(task=task).id
    assert ExperimentConfig(task=same).to_json() == ExperimentConfig(task=task).to_json()
