"""Config of one trained model with an id: all settings that decide its numbers."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass

from mechinterp.config.covariance import CovarianceConfig
from mechinterp.config.model import ModelConfig
from mechinterp.config.task import TaskConfig
from mechinterp.config.train import TrainConfig
from mechinterp.fields import Rules, build, flatten, set_checked, unknown_field

# Fields that were added after the first version. At their defaults they do not enter the id, so
# that old ids are kept.
LATER_FIELDS = {
    "task": ("shared_beta", "nonzeros", "n_tasks", "task_seed", "drift"),
    "model": (
        *("attend_to_self", "biases", "merged_qk", "context_only", "d_model"),
        *("norm", "final_norm", "norm_eps", "d_mlp", "activation", "layout", "n_positions"),
        *("d_read_in", "rotary_dim", "rotary_base", "rotary_adjacent_pairs"),
        *("rms_norm", "gates", "gate_start"),
    ),
    "train": (
        *("optimizer", "init_std", "shortest_context", "schedule", "clip_norm", "warm_up"),
        *("weight_decay", "loss", "first_position"),
        *("curriculum_every", "curriculum_d_x", "curriculum_length"),
    ),
}
UNUSED_BY_ONE_LAYER = (
    *("shortest_context", "schedule", "clip_norm", "warm_up", "weight_decay"),
    "curriculum_every",
)
"""Settings of training that one layer of plain attention does not use."""


@dataclass(frozen=True)
class ExperimentConfig:
    """All settings that decide the numbers of one trained model.

    See also:
        `preset`, `override`.
    """

    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        set_checked(self, "")
        Rules("", self).at_least(0, "seed")
        self._check_model()
        if self.train.optimizer == "adam":
            unused = "is not used by train.optimizer 'adam'"
            Rules("train", self.train).require("init_std", self.train.init_std is None, unused)
            Rules("task", self.task).require("n_sequences", self.task.n_sequences is None, unused)
        else:
            self._check_linear()

    def _check_model(self) -> None:
        """Refuse sizes that do not fit together, and settings that training this model does not
        use."""
        model, task, train, length = self.model, self.task, self.train, self.task.context_length
        of_model, of_task, of_train = (
            Rules("model", model),
            Rules("task", task),
            Rules("train", train),
        )
        rule = f"must be d_model = {self.d_model} if merged_qk is true"
        merges = not model.merged_qk or self.d_head == self.d_model
        Rules("model", self).require("d_head", merges, rule)
        rule = f"must be at most the width {self.d_head} of a head"
        fits = model.rotary_dim is None or model.rotary_dim <= self.d_head
        of_model.require("rotary_dim", fits, rule)
        rule = f"must divide the width {self.d_model} if d_head is null"
        divides = not model.context_only or not self.d_model % model.n_heads
        of_model.require("n_heads", model.d_head is not None or divides, rule)
        rule = f"must be <= d_x = {task.d_x} if model.layout is 'in_turn'"
        of_task.require("d_y", model.layout == "pairs" or task.d_y <= task.d_x, rule)
        most = model.longest_context
        rule = f"must be <= {most}, the most that {model.n_positions} positions allow"
        of_task.require("context_length", most is None or length <= most, rule)
        rule = "must be 'query' for a model that is neither causal with tokens in turn nor one recurrent"
        rule += (
            f" layer (model.layout {model.layout!r}, context_only {json.dumps(model.context_only)})"
        )
        of_train.require("loss", model.predicts_everywhere or train.loss == "query", rule)
        if self.trains_compiled:
            rule = "is not used in training one layer of plain attention"
            for name in UNUSED_BY_ONE_LAYER:
                of_train.require(name, getattr(train, name) is None, rule)
        for name, most in {"d_x": task.d_x, "length": length}.items():
            start = getattr(train, f"curriculum_{name}")
            rule = f"must be at most the task's {most}"
            of_train.require(f"curriculum_{name}", start is None or start <= most, rule)
        fixed = train.curriculum_every is None or task.drift == 1
        of_task.require("drift", fixed, "must be 1 for a curriculum (train.curriculum_every)")
        fits = train.shortest_context is None or train.shortest_context <= length
        of_train.require("shortest_context", fits, f"must be <= task.context_length = {length}")

    def _check_linear(self) -> None:
        """Refuse settings that training on moments (in closed form) does not support."""
        optimizer = self.train.optimizer
        off = ("attend_to_self", "biases", "context_only", "final_norm")
        absent = ("d_model", "norm", "d_mlp", "n_positions", "rotary_dim", "d_read_in")
        needed: dict[str, object] = {"model.score": "linear/L", "model.n_layers": 1}
        needed |= {f"model.{name}": False for name in off}
        needed |= {f"model.{name}": None for name in absent}
        needed |= {"task.d_y": 1, "task.noise_var": 0.0}
        needed |= {"task.supports": None, "task.sparsity": None, "task.drift": 1.0}
        if optimizer == "gradient_flow":
            needed["task.n_sequences"] = None
        if self.task.n_tasks is not None:
            # The second moment of a pool does not share eigenvectors with another covariance.
            needed["task.covariance.kind"] = "identity"
        for name, value in needed.items():
            value_here = value_of(self, name)
            if value_here != value:
                raise ValueError(
                    f"{name} must be {json.dumps(value)} for train.optimizer {optimizer!r}, got {json.dumps(value_here)}."
                )
        rule = f"must not be 0 for train.optimizer {optimizer!r}"
        Rules("model", self.model).require("score_slope", self.model.score_slope != 0, rule)

    @property
    def d_model(self) -> int:
        """Width of the residual stream: `model.d_model`, or the width of a token."""
        return self.model.stream_width(self.task.d_x, self.task.d_y)

    @property
    def d_head(self) -> int:
        """Width of a head; the default is the stream width, or its share per head for context-only
        models."""
        return self.model.head_width(self.task.d_x, self.task.d_y)

    @property
    def trains_compiled(self) -> bool:
        """True if the compiled step or the closed forms of linear attention train it; False if
        autograd does."""
        merged_by_adam = self.model.merged_qk and self.train.optimizer == "adam"
        return self.model.trains_compiled and not merged_by_adam

    @property
    def id(self) -> str:
        """Eight hexadecimal digits of the hash of the sorted JSON; later fields enter only if they
        differ from their default."""
        values = self.to_dict()
        default = ExperimentConfig()
        for section, names in LATER_FIELDS.items():
            for name in names:
                if values[section][name] == getattr(getattr(default, section), name):
                    del values[section][name]
        if self.train.schedule == "cosine":  # as in the first version
            values["train"]["cosine"] = bool(values["train"].pop("schedule"))
        text = json.dumps(values, indent=2, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def to_json(self) -> str:
        """The config as sorted, indented JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def to_dict(self) -> dict:
        """All fields, nested; scale and matrix of the covariance only if they are not the default."""
        values = asdict(self)
        covariance, default = values["task"]["covariance"], CovarianceConfig()
        for name in ("scale", "matrix"):
            if covariance[name] == getattr(default, name):
                del covariance[name]
        return values

    @classmethod
    def from_json(cls, text: str) -> "ExperimentConfig":
        """The config written by `to_json`; missing fields get their defaults."""
        return from_dict(json.loads(text))


def from_dict(values: object) -> ExperimentConfig:
    """Config from a nested dictionary; missing fields get their defaults.

    Files of earlier versions have `train.cosine`, true or false, in place of `train.schedule`.

    Raises:
        ValueError: If a field is unknown (the message lists the known ones), of the wrong type or
            out of range.
    Example:
        >>> from_dict({"task": {"d_x": 3}, "seed": 1}).task.d_x
        3
    """
    if isinstance(values, dict) and isinstance(values.get("train"), dict):
        values = values | {"train": _with_schedule(values["train"])}
    return build(ExperimentConfig, values)


def _with_schedule(train: dict) -> dict:
    """Training settings with `schedule` in place of `cosine`."""
    if not isinstance(train.get("cosine"), bool) or "schedule" in train:
        return train
    rest = {name: value for name, value in train.items() if name != "cosine"}
    return rest | {"schedule": "cosine" if train["cosine"] else None}


def override(config: ExperimentConfig, *assignments: str) -> ExperimentConfig:
    """The config with several fields changed at once.

    Args:
        assignments: Texts such as "model.n_heads=4"; the value is parsed as JSON, or else kept as
            text.
    Raises:
        ValueError: If an assignment has no "=" or names an unknown field.
    See also:
        `preset`, `ExperimentConfig`.
    Example:
        >>> override(ExperimentConfig(), "model.n_heads=4", "seed=1").model.n_heads
        4
    """
    values = asdict(config)
    for assignment in assignments:
        name, equals, text = str(assignment).partition("=")
        if not equals or not isinstance(assignment, str):
            raise ValueError(f"An assignment must have the form field=value, got {assignment!r}.")
        value_of(config, name)
        *parents, last = name.split(".")
        inner = values
        for parent in parents:
            inner = inner[parent]
        try:
            inner[last] = json.loads(text)
        except json.JSONDecodeError:
            inner[last] = text
    return from_dict(values)


def value_of(config: ExperimentConfig, name: str) -> object:
    """Value of a field with a dotted name, such as "train.data_seed".

    Raises:
        ValueError: If there is no such field; the message lists the known ones.
    Example:
        >>> value_of(ExperimentConfig(), "train.batch_size")
        256
    """
    value: object = config
    prefix = ""
    for part in name.split("."):
        known = [f.name for f in fields(value)] if is_dataclass(value) else []
        if part not in known:
            raise ValueError(unknown_field(f"{prefix}{part}", prefix, known))
        value = getattr(value, part)
        prefix += f"{part}."
    return value


def differences(
    there: ExperimentConfig, here: ExperimentConfig
) -> dict[str, tuple[object, object]]:
    """Fields in which two configs differ, by dotted name, with both values.

    Example:
        >>> differences(ExperimentConfig(), ExperimentConfig(seed=3))
        {'seed': (0, 3)}
    """
    left, right = flatten(asdict(there)), flatten(asdict(here))
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}
