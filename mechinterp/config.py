"""What decides the numbers of an experiment: the task, the model, the training and the seed.

Configs are frozen, nested and JSON; they hold no device, no path and no verbosity. A config that
asks for something the package cannot do is refused when it is made.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass

from mechinterp.fields import (
    build,
    flatten,
    require_at_least,
    require_at_most,
    set_checked,
    unknown_field,
)

COVARIANCES = ("identity", "kms", "eigenvalues")
SCORES = ("softmax", "1+tanh", "1+Cx", "(1+Cx)^2", "linear", "linear/L")
CONTEXT_ONLY_SCORES = (*SCORES, "relu/L")
"""Scores of models in which every token reads the context; `SCORES` are those of one layer."""
OPTIMIZERS = ("adam", "gradient_descent", "gradient_flow")
MAX_SIZE = 2**20
"""Of a dimension or a count, so that a file cannot ask for loops without end."""
NONZEROS = ("gaussian", "signs")


# Fields that the first version did not have: they must not change the ids it gave.
LATER_FIELDS = {
    "task": ("shared_beta", "nonzeros"),
    "model": ("attend_to_self", "biases", "merged_qk", "context_only", "d_model"),
    "train": ("optimizer", "init_std", "shortest_context", "cosine", "clip_norm"),
}


@dataclass(frozen=True)
class CovarianceConfig:
    """Covariance Sigma of the covariates."""

    kind: str = "identity"
    """"identity", "kms" (Kac-Murdock-Szego, Sigma_ij = rho^|i-j|) or "eigenvalues" (a diagonal Sigma)."""
    rho: float = 0.0
    """Correlation of neighbouring coordinates, used by "kms"."""
    eigenvalues: tuple[float, ...] = ()
    """The d_x diagonal entries, used by "eigenvalues"."""

    def __post_init__(self) -> None:
        set_checked(self, "task.covariance")
        if self.kind not in COVARIANCES:
            raise ValueError(
                f"task.covariance.kind must be one of {', '.join(COVARIANCES)}, got {self.kind!r}."
            )
        if self.rho and self.kind != "kms":
            raise ValueError(f"task.covariance.rho is used by kind 'kms' only, got {self.rho}.")
        if self.eigenvalues and self.kind != "eigenvalues":
            raise ValueError(
                f"task.covariance.eigenvalues are used by kind 'eigenvalues' only, got {list(self.eigenvalues)}."
            )
        if not -1 < self.rho < 1:
            raise ValueError(f"task.covariance.rho must lie in (-1, 1), got {self.rho}.")
        if self.kind == "eigenvalues" and not (self.eigenvalues and min(self.eigenvalues) > 0):
            raise ValueError(
                f"task.covariance.eigenvalues must be positive numbers, got {list(self.eigenvalues)}."
            )


@dataclass(frozen=True)
class TaskConfig:
    """Law of the prompts: x ~ N(0, Sigma), beta ~ N(0, beta_var), y = x beta + N(0, noise_var)."""

    d_x: int = 5
    """Dimension of a covariate."""
    d_y: int = 1
    """Number of responses of a pair, each with a task vector of its own."""
    context_length: int = 40
    """Number L of (x, y) pairs before the query."""
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    """Covariance of x and of x_query."""
    beta_var: float | None = None
    """Variance of an entry of the task vector that may be nonzero; None stands for 1 / d_x."""
    noise_var: float = 0.1
    """Variance of the response noise, unit y^2."""
    query_noise: bool = True
    """Whether y_query, the target of training, carries noise too."""
    supports: tuple[tuple[int, ...], ...] | None = None
    """Covariate coordinates, from 0, that each response depends on; None: all of them."""
    shared_beta: bool = False
    """Whether all responses have one task vector, each on its own support, instead of one each."""
    sparsity: int | None = None
    """Number s of nonzero entries of a task vector, drawn afresh in every prompt; None: all of them."""
    nonzeros: str = "gaussian"
    """Law of the nonzero entries where there is a sparsity: "gaussian", N(0, beta_var), or "signs", +-1/sqrt(s)."""
    n_sequences: int | None = None
    """Size of a finite training set, for optimizer "gradient_descent"; None: the whole population."""

    def __post_init__(self) -> None:
        set_checked(self, "task")
        require_at_least("task", self, 1, "d_x", "d_y", "context_length")
        require_at_most("task", self, MAX_SIZE, "d_x", "d_y", "context_length")
        require_at_least("task", self, 0, "noise_var")
        if self.beta_var is not None and self.beta_var <= 0:
            raise ValueError(f"task.beta_var must be > 0, got {self.beta_var}.")
        eigenvalues = self.covariance.eigenvalues
        if self.covariance.kind == "eigenvalues" and len(eigenvalues) != self.d_x:
            raise ValueError(
                f"task.covariance.eigenvalues must hold d_x = {self.d_x} numbers, got {len(eigenvalues)}."
            )
        self._check_supports()
        self._check_sparsity()
        if self.n_sequences is not None:
            require_at_least("task", self, 1, "n_sequences")

    def _check_supports(self) -> None:
        if self.supports is None:
            return
        if len(self.supports) != self.d_y:
            raise ValueError(
                f"task.supports must hold one list for each of {self.d_y} responses, got {len(self.supports)}."
            )
        for support in self.supports:
            if not support or len(set(support)) < len(support):
                raise ValueError(
                    f"task.supports must list coordinates, each once, got {list(support)}."
                )
            if not all(0 <= coordinate < self.d_x for coordinate in support):
                raise ValueError(
                    f"task.supports must name coordinates from 0 to {self.d_x - 1}, got {list(support)}."
                )

    def _check_sparsity(self) -> None:
        if self.nonzeros not in NONZEROS:
            raise ValueError(
                f"task.nonzeros must be one of {', '.join(NONZEROS)}, got {self.nonzeros!r}."
            )
        if self.sparsity is None:
            if self.nonzeros != "gaussian":
                raise ValueError(
                    f"task.nonzeros {self.nonzeros!r} needs a task.sparsity, got null."
                )
            return
        if not 1 <= self.sparsity <= self.d_x:
            raise ValueError(
                f"task.sparsity must lie between 1 and d_x = {self.d_x}, got {self.sparsity}."
            )
        if self.supports is not None:
            raise ValueError(
                f"task.sparsity is not used where task.supports are given, got {self.sparsity}."
            )
        if self.nonzeros == "signs" and self.beta_var is not None:
            raise ValueError(
                f"task.beta_var is 1/sparsity where task.nonzeros is 'signs' and must be null, got {self.beta_var}."
            )

    @property
    def beta_variance(self) -> float:
        """Variance of an entry of the task vector that is not held at zero, with the default filled in."""
        if self.sparsity is not None and self.nonzeros == "signs":
            return 1 / self.sparsity
        return 1 / self.d_x if self.beta_var is None else self.beta_var

    @property
    def signal_var(self) -> float:
        """Variance of x . beta, the mean over responses: beta_var times the trace of Sigma on a support, unit y^2."""
        given = self.covariance.kind == "eigenvalues"
        diagonal = self.covariance.eigenvalues if given else (1.0,) * self.d_x
        supports = self.supports or (tuple(range(self.d_x)),)
        traces = [sum(diagonal[i] for i in support) for support in supports]
        live = 1.0 if self.sparsity is None else self.sparsity / self.d_x
        return live * self.beta_variance * sum(traces) / len(traces)


@dataclass(frozen=True)
class ModelConfig:
    """An attention-only model that reads (x, y) tokens and predicts y_query."""

    n_layers: int = 1
    """Number of attention layers."""
    n_heads: int = 2
    """Heads per layer."""
    d_head: int | None = None
    """Width of a head; None stands for the width d_model, and in context-only models for d_model / n_heads."""
    score: str = "softmax"
    """Attention weights are f(s_i) / sum_j f(s_j); "softmax" has f = exp, the others name f. Linear
    attention has C s_i ("linear") or C s_i over the number of keys ("linear/L")."""
    score_slope: float = 1.0
    """The constant C of "1+Cx", "(1+Cx)^2" and linear attention."""
    attend_to_self: bool = False
    """Whether the query is among its own keys; the models trained here read the context alone."""
    biases: bool = False
    """Whether the layer has biases b_Q, b_K, b_V, b_O; the models trained here have none."""
    merged_qk: bool = False
    """Whether each head has one matrix W_QK in place of W_Q W_K^T; d_head is then d_model."""
    context_only: bool = False
    """Whether every token reads all tokens of the context and none reads the query; models of several layers do.
    Without it a token reads those before it, which for one layer makes no difference to the prediction."""
    d_model: int | None = None
    """Width of the residual stream, with a read-in W_in before it and a read-out W_U behind it; None: the tokens
    (x, y) are the stream, of width d_x + d_y, and its y entries the prediction. Needs context_only."""

    def __post_init__(self) -> None:
        set_checked(self, "model")
        require_at_least("model", self, 1, "n_layers", "n_heads")
        require_at_most("model", self, MAX_SIZE, "n_layers", "n_heads")
        if self.d_head is not None:
            require_at_least("model", self, 1, "d_head")
            require_at_most("model", self, MAX_SIZE, "d_head")
        scores = CONTEXT_ONLY_SCORES if self.context_only else SCORES
        if self.score not in scores:
            raise ValueError(f"model.score must be one of {', '.join(scores)}, got {self.score!r}.")
        self._check_mask()

    def _check_mask(self) -> None:
        if not self.context_only:
            if self.n_layers != 1:
                raise ValueError(
                    f"model.n_layers must be 1 unless context_only is true, got {self.n_layers}."
                )
            if self.d_model is not None:
                raise ValueError(
                    f"model.d_model must be null unless context_only is true, got {self.d_model}."
                )
            return
        for name in ("attend_to_self", "biases", "merged_qk"):
            if getattr(self, name):
                raise ValueError(
                    f"model.{name} must be false where context_only is true, got true."
                )
        if self.d_model is not None:
            require_at_least("model", self, 1, "d_model")
            require_at_most("model", self, MAX_SIZE, "d_model")


@dataclass(frozen=True)
class TrainConfig:
    """Minimisation of the mean squared error at the query, by Adam with fresh prompts in every step unless told."""

    steps: int = 500_001
    """Number of updates."""
    batch_size: int = 256
    """Prompts per step."""
    learning_rate: float = 1e-3
    """The step size; Adam's other constants are PyTorch's defaults. A gradient flow takes 2 steps learning_rate
    units of its time tau in all, as long as descent at this step size."""
    data_seed: int = 0
    """Seed of the prompts; models with the same one see the same prompts."""
    log_every: int = 1000
    """Steps between two rows of the history."""
    snapshot_every: int | None = None
    """Steps between two snapshots of the weights; None: 0, 1k, 2k, 5k, 10k, 20k, 50k, ..."""
    n_eval_prompts: int = 4096
    """Number of fixed prompts behind `eval_loss`."""
    optimizer: str = "adam"
    """"adam", or for one layer of linear attention "gradient_descent", full-batch, on the population or a finite
    training set, or "gradient_flow", exact, on the population; these train v, K and Q (or U) of every head."""
    init_std: float | None = None
    """Standard deviation of the initial v, K, Q or U of linear attention; None: PyTorch's default."""
    shortest_context: int | None = None
    """Contexts of a step of a context-only model have one length, uniform from this one to task.context_length;
    None: task.context_length."""
    cosine: bool = False
    """Whether the step size of a context-only model falls to 0 along half a cosine, instead of staying."""
    clip_norm: float | None = None
    """Largest norm of a gradient of a context-only model, longer ones are shortened to it; None: any."""

    def __post_init__(self) -> None:
        set_checked(self, "train")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"train.optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}."
            )
        if self.init_std is not None and self.init_std <= 0:
            raise ValueError(
                f"train.init_std must be > 0, got {self.init_std}: zero weights never move."
            )
        require_at_least("train", self, 1, "steps", "batch_size", "log_every", "n_eval_prompts")
        require_at_least("train", self, 0, "data_seed")
        if self.learning_rate <= 0:
            raise ValueError(f"train.learning_rate must be > 0, got {self.learning_rate}.")
        for name in ("snapshot_every", "shortest_context"):
            if getattr(self, name) is not None:
                require_at_least("train", self, 1, name)
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"train.clip_norm must be > 0, got {self.clip_norm}.")

    @property
    def snapshot_steps(self) -> tuple[int, ...]:
        """Steps (numbers of updates) at which the weights are kept, 0 included."""
        if self.snapshot_every is not None:
            return tuple(range(0, self.steps + 1, self.snapshot_every))
        grid = (mantissa * 10**power for power in range(3, 19) for mantissa in (1, 2, 5))
        return (0, *(step for step in grid if step <= self.steps))


@dataclass(frozen=True)
class ExperimentConfig:
    """Everything that decides the numbers of one trained model."""

    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        set_checked(self, "")
        require_at_least("", self, 0, "seed")
        if self.model.merged_qk and self.d_head != self.d_model:
            raise ValueError(
                f"model.d_head must be d_model = {self.d_model} where merged_qk is true, got {self.d_head}."
            )
        self._check_context_only()
        if self.train.optimizer == "adam":
            for name, value in (
                ("train.init_std", self.train.init_std),
                ("task.n_sequences", self.task.n_sequences),
            ):
                if value is not None:
                    raise ValueError(f"{name} is not used by train.optimizer 'adam', got {value}.")
        else:
            self._check_linear()

    def _check_context_only(self) -> None:
        if not self.model.context_only:
            for name, default in (
                ("shortest_context", None),
                ("cosine", False),
                ("clip_norm", None),
            ):
                value = getattr(self.train, name)
                if value != default:
                    raise ValueError(
                        f"train.{name} is used where model.context_only is true only, got {json.dumps(value)}."
                    )
            return
        if self.train.optimizer != "adam":
            raise ValueError(
                f"train.optimizer must be 'adam' where model.context_only is true, got {self.train.optimizer!r}."
            )
        if self.model.d_head is None and self.d_model % self.model.n_heads:
            raise ValueError(
                f"model.n_heads must divide the width {self.d_model} where d_head is null, got {self.model.n_heads}."
            )
        shortest = self.train.shortest_context
        if shortest is not None and shortest > self.task.context_length:
            raise ValueError(
                f"train.shortest_context must be <= task.context_length = {self.task.context_length}, got {shortest}."
            )

    def _check_linear(self) -> None:
        """Refuse what the closed forms behind training on moments do not cover."""
        optimizer = self.train.optimizer
        needed = {"model.score": "linear/L", "model.attend_to_self": False, "model.biases": False}
        needed |= {"task.d_y": 1, "task.noise_var": 0.0, "task.supports": None}
        needed["task.sparsity"] = None
        if optimizer == "gradient_flow":
            needed["task.n_sequences"] = None
        for name, value in needed.items():
            found = value_of(self, name)
            if found != value:
                raise ValueError(
                    f"{name} must be {json.dumps(value)} for train.optimizer {optimizer!r}, got {json.dumps(found)}."
                )
        if self.model.score_slope == 0:
            raise ValueError(
                f"model.score_slope must not be 0 for train.optimizer {optimizer!r}, got 0.0."
            )

    @property
    def d_model(self) -> int:
        """Width of the residual stream: that of a token, d_x + d_y, unless the model has its own."""
        width = self.model.d_model
        return self.task.d_x + self.task.d_y if width is None else width

    @property
    def d_head(self) -> int:
        """Width of a head, with the default filled in."""
        if self.model.d_head is not None:
            return self.model.d_head
        return self.d_model // self.model.n_heads if self.model.context_only else self.d_model

    @property
    def id(self) -> str:
        """Eight hexadecimal digits of the sorted JSON, later fields left out where they hold their defaults."""
        values = asdict(self)
        default = ExperimentConfig()
        for section, names in LATER_FIELDS.items():
            for name in names:
                if values[section][name] == getattr(getattr(default, section), name):
                    del values[section][name]
        text = json.dumps(values, indent=2, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def to_json(self) -> str:
        """The config as sorted, indented JSON."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ExperimentConfig":
        """The config written by `to_json`; fields left out keep their defaults."""
        return from_dict(json.loads(text))


def from_dict(values: object) -> ExperimentConfig:
    """The config with the fields of a nested dictionary, the others at their defaults.

    Raises:
        ValueError: If a field is unknown (the known ones are listed), of the wrong type or out of range.
    Example:
        >>> from_dict({"task": {"d_x": 3}, "seed": 1}).task.d_x
        3
    """
    return build(ExperimentConfig, values)


def override(config: ExperimentConfig, *assignments: str) -> ExperimentConfig:
    """The config with fields changed, all at once.

    Args:
        assignments: Texts such as "model.n_heads=4"; the value is read as JSON, else as text.
    Raises:
        ValueError: If an assignment has no "=" or names an unknown field.
    Example:
        >>> override(ExperimentConfig(), "model.n_heads=4", "seed=1").model.n_heads
        4
    """
    values = asdict(config)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"An assignment reads field=value, got {assignment!r}.")
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
    """The value of a field named with dots, such as "train.data_seed".

    Raises:
        ValueError: If there is no such field; the known ones are listed.
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
