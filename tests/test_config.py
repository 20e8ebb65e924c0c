"""Configs: a trip through JSON changes nothing, and nothing that cannot be done is accepted."""

import copy
import json
import math
import pickle
import re
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mechinterp.config import (
    SCORES,
    CovarianceConfig,
    ExperimentConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
    differences,
    from_dict,
    override,
)
from mechinterp.config.task import COVARIANCES
from mechinterp.presets import PRESETS, preset

positive = st.floats(min_value=1e-6, max_value=1e6)
count = st.integers(min_value=1, max_value=10**6)
seed = st.integers(min_value=0, max_value=2**63)


@st.composite
def experiments(draw: st.DrawFn) -> dict:
    """Values of a config, as `from_dict` takes them."""
    d_x = draw(st.integers(1, 6))
    eigenvalues = st.lists(positive, min_size=d_x, max_size=d_x)
    covariance = st.one_of(
        st.just({}),
        st.fixed_dictionaries({"kind": st.just("kms"), "rho": st.floats(-0.99, 0.99)}),
        st.fixed_dictionaries({"kind": st.just("eigenvalues"), "eigenvalues": eigenvalues}),
    )
    task = {
        "d_x": st.just(d_x),
        "d_y": st.integers(1, 3),
        "context_length": count,
        "covariance": covariance,
        "beta_var": st.none() | positive,
        "noise_var": st.floats(0, 10) | st.integers(0, 10),
        "query_noise": st.booleans(),
    }
    model = {
        "n_heads": count,
        "d_head": st.none() | count,
        "score": st.sampled_from(SCORES),
        "score_slope": st.floats(-2, 2),
    }
    train = {
        "steps": count,
        "batch_size": count,
        "learning_rate": positive,
        "data_seed": seed,
        "snapshot_every": st.none() | count,
    }
    groups = {
        "task": st.fixed_dictionaries(task),
        "model": st.fixed_dictionaries({}, optional=model),
        "train": st.fixed_dictionaries({}, optional=train),
    }
    return draw(st.fixed_dictionaries(groups, optional={"seed": seed}))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(experiments())
def test_a_trip_through_json_changes_nothing(values: dict):
    config = from_dict(values)
    back = ExperimentConfig.from_json(config.to_json())
    assert back == config
    assert back.to_json() == config.to_json()
    assert back.id == config.id
    assert differences(config, back) == {}


def test_an_empty_object_is_the_published_setting():
    config = ExperimentConfig.from_json("{}")
    assert config == ExperimentConfig() == preset("softmax-h2")
    task, model, train = config.task, config.model, config.train
    assert (task.d_x, task.d_y, task.context_length, task.noise_var) == (5, 1, 40, 0.1)
    assert (model.n_layers, model.n_heads, model.score) == (1, 2, "softmax")
    assert (train.steps, train.batch_size, train.learning_rate) == (500_001, 256, 1e-3)


def test_the_id_is_stable():
    # Folders and histories carry ids, so a new version of the package must not change them.
    assert ExperimentConfig().id == "5926da76"


def test_configs_that_differ_have_different_ids():
    changes = [
        "model.biases=true",
        "task.shared_beta=true",
        "model.attend_to_self=true",
        "seed=1",
        "task.d_x=6",
        "task.query_noise=false",
        "model.d_head=6",
        "train.steps=9",
        "model.merged_qk=true",
        "task.sparsity=2",
        'task={"sparsity": 2, "nonzeros": "signs"}',
        "model.context_only=true",
        'model={"context_only": true, "n_heads": 3}',
        "task.n_tasks=16",
    ]
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


def test_a_task_is_told_whole_with_the_numbers_of_its_defaults():
    assert TaskConfig().assuming(()).in_words == (
        "d_x 5, d_y 1, context_length 40, covariance identity, beta_var 0.2 (1/d_x), noise_var 0.1, query_noise yes"
    )
    kms = TaskConfig(covariance=CovarianceConfig("kms", rho=0.5), noise_var=0, query_noise=False)
    # Without noise it does not matter whether the query has some.
    assert kms.assuming(["covariance", "query_noise"]).in_words.endswith(
        "covariance kms with rho 0.5, beta_var 0.2 (1/d_x), noise_var 0; assumed: covariance"
    )
    signs = TaskConfig(d_x=16, sparsity=4, nonzeros="signs", query_noise=False)
    assert signs.assuming(()).in_words.endswith(
        "beta_var 0.25 (1/sparsity), noise_var 0.1, query_noise no, sparsity 4, nonzeros signs"
    )
    several = TaskConfig(d_x=3, d_y=2, beta_var=1, supports=((0, 1), (1, 2)), shared_beta=True)
    assert several.assuming(()).in_words.endswith("supports (0, 1), (1, 2), shared_beta yes")
    assert TaskConfig(d_y=2).told["supports"] == "all"
    assert TaskConfig(n_sequences=7).told["n_sequences"] == "7"
    covariance = CovarianceConfig("eigenvalues", eigenvalues=tuple(range(1, 10)))
    many = TaskConfig(d_x=9, covariance=covariance)
    assert many.told["covariance"] == "diagonal, 9 numbers from 1 to 9"


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


def test_softmax_presets_are_named_by_their_heads():
    presets = {name: PRESETS[name] for name in PRESETS if name.startswith("softmax")}
    assert {name: config.model.n_heads for name, config in presets.items()} == {
        f"softmax-h{n}": n for n in (1, 2, 3, 4, 8)
    }
    for config in presets.values():
        assert differences(config, PRESETS["softmax-h2"]).keys() <= {"model.n_heads"}


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


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"^Preset must be one of .*, got 'softmax-h5'\.$"):
        preset("softmax-h5")


KINDS = ", ".join(COVARIANCES)
KNOWN = ", ".join(f"model.{field.name}" for field in fields(ModelConfig))
NO_INTEGERS = {
    **{"2.5": "2.5", "2.0": "2.0", "true": "True", "abc": "'abc'", "": "''", "null": "None"},
    **{"[2]": "[2]", "NaN": "nan", "Infinity": "inf"},
}
"""Texts of values, and what is said of them."""
AT_LEAST_ONE = {
    "task": ("d_x", "d_y", "context_length", "n_tasks", "n_sequences"),
    "model": ("n_layers", "n_heads", "d_head", "d_mlp", "n_positions"),
    "train": ("steps", "batch_size", "log_every", "n_eval_prompts", "snapshot_every", "warm_up"),
}
REFUSED = {
    **{
        f"model.n_heads={value}": f"model.n_heads must be an integer, got {got}."
        for value, got in NO_INTEGERS.items()
    },
    **{
        f"{group}.{name}=0": f"{group}.{name} must be >= 1, got 0."
        for group, names in AT_LEAST_ONE.items()
        for name in names
    },
    # wrong types
    "model.d_head=x": "model.d_head must be an integer or null, got 'x'.",
    "model.score=3": "model.score must be text, got 3.",
    "task.query_noise=1": "task.query_noise must be true or false, got 1.",
    "task.noise_var=true": "task.noise_var must be a number, got True.",
    "task.noise_var=NaN": "task.noise_var must be finite, got nan.",
    "task.noise_var=Infinity": "task.noise_var must be finite, got inf.",
    "task.noise_var=1e999": "task.noise_var must be finite, got inf.",
    "task.noise_var=1" + "0" * 400: "task.noise_var must be finite, got inf.",
    "task.beta_var=x": "task.beta_var must be a number or null, got 'x'.",
    "task.covariance.eigenvalues=3": "task.covariance.eigenvalues must be a list, got 3.",
    'task.covariance.eigenvalues=["a"]': "task.covariance.eigenvalues[0] must be a number, got 'a'.",
    "task.covariance.eigenvalues=[1, NaN]": "task.covariance.eigenvalues[1] must be finite, got nan.",
    "task.covariance=kms": 'task.covariance must be a JSON object such as {"kind": "identity", "scale": 2} or '
    '{"kind": "matrix", "matrix": [[1, 0.5], [0.5, 1]]}, got \'kms\'.',
    "task=[]": "task must be a JSON object, got [].",
    # values out of range
    "task.noise_var=-0.1": "task.noise_var must be >= 0, got -0.1.",
    "task.beta_var=0": "task.beta_var must be > 0, got 0.0.",
    "task.covariance.kind=wishart": f"task.covariance.kind must be one of {KINDS}, got 'wishart'.",
    "task.covariance.rho=0.5": "task.covariance.rho is used by kind 'kms' only, got 0.5.",
    'task.covariance={"kind": "kms", "rho": 1}': "task.covariance.rho must lie in (-1, 1), got 1.0.",
    "task.covariance.eigenvalues=[1, 2]": (
        "task.covariance.eigenvalues are used by kind 'eigenvalues' only, got [1.0, 2.0]."
    ),
    'task.covariance={"kind": "eigenvalues"}': (
        "task.covariance.eigenvalues must be positive numbers, got []."
    ),
    'task.covariance={"kind": "eigenvalues", "eigenvalues": [1, 0]}': (
        "task.covariance.eigenvalues must be positive numbers, got [1.0, 0.0]."
    ),
    'task.covariance={"kind": "eigenvalues", "eigenvalues": [1, 2]}': (
        "task.covariance.eigenvalues must have d_x = 5 numbers, got 2."
    ),
    "task.supports=[]": "task.supports must list coordinates from 0 to 4, each once, for each of 1 responses, got [].",
    "task.supports=[[]]": "task.supports must list coordinates from 0 to 4, each once, for each of 1 responses, got [()].",
    "task.supports=[[1, 1]]": "task.supports must list coordinates from 0 to 4, each once, for each of 1 responses, got [(1, 1)].",
    "task.supports=[[0, 5]]": "task.supports must list coordinates from 0 to 4, each once, for each of 1 responses, got [(0, 5)].",
    "task.sparsity=6": "task.sparsity must lie between 1 and d_x = 5, got 6.",
    "task.sparsity=0": "task.sparsity must lie between 1 and d_x = 5, got 0.",
    'task={"sparsity": 1, "supports": [[0]]}': (
        "task.sparsity cannot be combined with task.supports, got 1."
    ),
    "task.nonzeros=cauchy": "task.nonzeros must be one of gaussian, signs, got 'cauchy'.",
    "task.nonzeros=signs": "task.nonzeros needs a task.sparsity, got 'signs'.",
    'task={"sparsity": 1, "nonzeros": "signs", "beta_var": 1}': (
        "task.beta_var must be null if task.nonzeros is 'signs' (it is then 1/sparsity), got 1.0."
    ),
    "task.n_sequences=9": "task.n_sequences is not used by train.optimizer 'adam', got 9.",
    "task.task_seed=3": "task.task_seed needs a task.n_tasks, got 3.",
    "task.n_tasks=1048577": "task.n_tasks must be <= 1048576, got 1048577.",
    "model.norm=batch": "model.norm must be one of before, after, null, got 'batch'.",
    "model.activation=step": (
        "model.activation must be one of relu, gelu, gelu_new, silu, tanh, got 'step'."
    ),
    "model.layout=mixed": "model.layout must be one of pairs, in_turn, got 'mixed'.",
    "model.d_read_in=4": "model.d_model must be given if d_read_in is, got null.",
    "model.layout=in_turn": "model.d_model must be given if layout is 'in_turn', got null.",
    'model={"layout": "in_turn", "d_model": 8, "n_positions": 80}': (
        "task.context_length must be <= 39, the most that 80 positions allow, got 40."
    ),
    "model.n_positions=40": (
        "task.context_length must be <= 39, the most that 40 positions allow, got 40."
    ),
    "model.norm_eps=-1": "model.norm_eps must be >= 0, got -1.0.",
    "model.score=relu/L": f"model.score must be one of {', '.join(SCORES)}, got 'relu/L'.",
    'model={"context_only": true, "d_model": 0}': "model.d_model must be >= 1, got 0.",
    'model={"context_only": true, "d_model": 9}': (
        "model.n_heads must divide the width 9 if d_head is null, got 2."
    ),
    'model={"context_only": true, "n_heads": 4}': (
        "model.n_heads must divide the width 6 if d_head is null, got 4."
    ),
    "train.shortest_context=0": "train.shortest_context must be >= 1, got 0.",
    "train.shortest_context=4": (
        "train.shortest_context is not used in training one layer of plain attention, got 4."
    ),
    "train.schedule=cosine": "train.schedule is not used in training one layer of plain attention, got 'cosine'.",
    "train.clip_norm=1": "train.clip_norm is not used in training one layer of plain attention, got 1.0.",
    "train.warm_up=2": "train.warm_up is not used in training one layer of plain attention, got 2.",
    "train.clip_norm=0": "train.clip_norm must be > 0, got 0.0.",
    "model.score=relu": f"model.score must be one of {', '.join(SCORES)}, got 'relu'.",
    "train.data_seed=-1": "train.data_seed must be >= 0, got -1.",
    "train.learning_rate=0": "train.learning_rate must be > 0, got 0.0.",
    "train.optimizer=sgd": "train.optimizer must be one of adam, gradient_descent, gradient_flow, got 'sgd'.",
    "train.init_std=0": "train.init_std must be > 0, got 0.0.",
    "train.init_std=-1": "train.init_std must be > 0, got -1.0.",
    "train.init_std=0.1": "train.init_std is not used by train.optimizer 'adam', got 0.1.",
    'model={"merged_qk": true, "d_head": 3}': (
        "model.d_head must be d_model = 6 if merged_qk is true, got 3."
    ),
    "seed=-1": "seed must be >= 0, got -1.",
    # wrong names
    "model.n_heads": "An assignment must have the form field=value, got 'model.n_heads'.",
    "n_heads=2": "Unknown field 'n_heads'; known: task, model, train, seed.",
    "model.heads=2": f"Unknown field 'model.heads'; known: {KNOWN}.",
    "seed.x=2": "Unknown field 'seed.x'; known: none.",
    'model={"heads": 2}': f"Unknown field 'model.heads'; known: {KNOWN}.",
}


@pytest.mark.parametrize(("assignment", "message"), REFUSED.items(), ids=[k[:45] for k in REFUSED])
def test_refused_with_one_line(assignment: str, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        override(ExperimentConfig(), assignment)


BEYOND_MOMENTS = {
    "model.score=linear": 'model.score must be "linear/L"{}, got "linear".',
    "model.attend_to_self=true": "model.attend_to_self must be false{}, got true.",
    "model.biases=true": "model.biases must be false{}, got true.",
    "model.d_model=5": "model.d_model must be null{}, got 5.",
    "model.n_layers=2": "model.n_layers must be 1{}, got 2.",
    "model.norm=before": 'model.norm must be null{}, got "before".',
    "model.score_slope=0": "model.score_slope must not be 0{}, got 0.0.",
    "task.d_y=2": "task.d_y must be 1{}, got 2.",
    "task.noise_var=0.1": "task.noise_var must be 0.0{}, got 0.1.",
    "task.supports=[[0, 1]]": "task.supports must be null{}, got [[0, 1]].",
    "task.n_sequences=9": "task.n_sequences must be null{}, got 9.",
    "task.sparsity=2": "task.sparsity must be null{}, got 2.",
}


@pytest.mark.parametrize(("assignment", "message"), BEYOND_MOMENTS.items(), ids=BEYOND_MOMENTS)
def test_what_the_moments_do_not_cover_is_refused(assignment: str, message: str):
    message = message.format(" for train.optimizer 'gradient_flow'")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        override(preset("linear-merged"), assignment)


def test_a_training_set_is_for_descent():
    descent = override(preset("linear-separate"), "train.optimizer=gradient_descent")
    assert override(descent, "task.n_sequences=9").task.n_sequences == 9


def test_fields_are_checked_when_a_config_is_made_in_python():
    for noise_var in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"task\.noise_var must be finite"):
            TaskConfig(noise_var=noise_var)
    with pytest.raises(ValueError, match=r"train\.learning_rate must be finite"):
        replace(TrainConfig(), learning_rate=math.nan)


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null"])
def test_json_that_is_no_object_is_refused(text: str):
    with pytest.raises(ValueError, match=r"^A config must be a JSON object, got "):
        ExperimentConfig.from_json(text)


def test_text_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="line 1 column 1"):
        ExperimentConfig.from_json("softmax")


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


def test_the_shortest_context_is_no_longer_than_the_longest():
    message = "train.shortest_context must be <= task.context_length = 40, got 41."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        override(ExperimentConfig(), "model.context_only=true", "train.shortest_context=41")


def test_a_task_remembers_what_was_passed_and_nothing_else_sees_it():
    task = TaskConfig(4, noise_var=0.1)
    assert task.given == {"d_x", "noise_var"}
    assert replace(task, d_y=2).given == {"d_x", "noise_var", "d_y"}
    assert copy.deepcopy(task).assumed == pickle.loads(pickle.dumps(task)).assumed == task.assumed
    same = task.assuming(())
    assert (same, hash(same), repr(same)) == (task, hash(task), repr(task))
    assert ExperimentConfig(task=same).id == ExperimentConfig(task=task).id
    assert ExperimentConfig(task=same).to_json() == ExperimentConfig(task=task).to_json()
