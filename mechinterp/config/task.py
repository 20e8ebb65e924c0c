"""The task: the law of the prompts."""

import json
from collections.abc import Collection, Mapping
from dataclasses import InitVar, asdict, dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mechinterp.config.covariance import CovarianceConfig
from mechinterp.fields import LARGEST_SETTING, MAX_SIZE, Rules, build, set_checked

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

NONZEROS = ("gaussian", "signs")
WEIGHTS_SUM = 1e-6
"""Largest distance from 1 of the sum of the weights of a mixture."""
SIZES = {"d_x", "d_y", "context_length"}
"""Fields of a task that are sizes."""
MAX_FILE = 2**22
"""Largest size of a task file, in bytes."""

UNKNOWN_TASK = "unknown"
"""Value of `task` for given prompts of unknown law."""

_T = TypeVar("_T")


def _noting_what_is_passed(cls: type[_T]) -> type[_T]:
    """The class with a record of the fields that are passed; `==`, `hash`, the id and JSON ignore
    the record."""
    own = cls.__init__

    @wraps(own)
    def init(self: _T, *values: object, **named: object) -> None:
        positional = (each.name for each in fields(cls)[: len(values)])  # type: ignore[arg-type]
        object.__setattr__(self, "_given", frozenset([*positional, *named]))
        own(self, *values, **named)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


@_noting_what_is_passed
@dataclass(frozen=True)
class TaskConfig:
    """Law of the prompts: x ~ N(0, Sigma), beta ~ N(0, beta_var), y = x beta + N(0, noise_var).

    With `drift` below 1, beta changes from pair to pair; every one of them has the same law.

    See also:
        `ExperimentConfig`, `sample_prompts`.
    """

    d_x: int = 5
    """Dimension of a covariate."""
    d_y: int = 1
    """Number of responses of a pair, each with its own task vector."""
    context_length: int = 40
    """Number L of pairs (x, y) before the query."""
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    """Covariance of x and of x_query."""
    beta_var: float | None = None
    """Variance of a nonzero entry of the task vector; None means 1 / d_x."""
    noise_var: float | tuple[tuple[float, float], ...] = 0.1
    """Variance of the response noise, unit y^2; or pairs (variance, weight), whose weights sum to
    1: every prompt has one of these variances, chosen with its weight."""
    query_noise: bool = True
    """True: y_query, the target of training, has noise too."""
    supports: tuple[tuple[int, ...], ...] | None = None
    """Coordinates of x, from 0, that each response depends on; None means all."""
    shared_beta: bool = False
    """True: all responses share one task vector, each on its own support. False: each response has
    its own."""
    sparsity: int | None = None
    """Number s of nonzero entries of a task vector, chosen anew in every prompt; None means all."""
    nonzeros: str = "gaussian"
    """Law of the nonzero entries for sparse tasks: "gaussian", N(0, beta_var), or "signs",
    +-1/sqrt(s)."""
    n_sequences: int | None = None
    """Size of a finite training set, for optimizer "gradient_descent"; None means the whole
    population."""
    n_tasks: int | None = None
    """Size M of a fixed pool from which the task vectors are drawn uniformly; None means fresh task
    vectors."""
    task_seed: int = 0
    """Seed of the pool; for one seed a smaller pool is the beginning of a larger one."""
    drift: float = 1.0
    """Correlation rho of the task vectors of neighbouring pairs, in (0, 1]: w_l = rho w_{l-1} +
    sqrt(1 - rho^2) times a fresh task vector. 1: one task vector for all pairs."""
    before: InitVar["TaskConfig | None"] = field(default=None, kw_only=True)
    """The task that `dataclasses.replace` changes; its assumed fields stay assumed unless they
    change."""

    def __post_init__(self, before: "TaskConfig | None") -> None:
        set_checked(self, "task")
        if before is not None:
            passed = self.given - {"before"}
            changed = {n for n in passed if getattr(self, n) != getattr(before, n)}
            object.__setattr__(self, "_given", before.given | changed)
        object.__setattr__(self, "before", self)  # dataclasses.replace reads it here
        rules = Rules("task", self)
        rules.at_least(1, "d_x", "d_y", "context_length")
        rules.at_most(MAX_SIZE, "d_x", "d_y", "context_length")
        self._check_noise(rules)
        rules.positive("beta_var")
        rules.at_most(LARGEST_SETTING, "beta_var")
        kind, size = self.covariance.kind, len(self.covariance.diagonal(self.d_x))
        if size != self.d_x:
            what = "numbers" if kind == "eigenvalues" else "rows"
            raise ValueError(
                f"task.covariance.{kind} must have d_x = {self.d_x} {what}, got {size}."
            )
        rules.at_least(1, "n_sequences", "n_tasks")
        rules.at_least(0, "task_seed")
        rules.at_most(MAX_SIZE, "n_tasks")
        pooled = not self.task_seed or self.n_tasks is not None
        rules.require("task_seed", pooled, "needs a task.n_tasks")
        self._check_sparsity(rules)
        self._check_drift(rules)

    def _check_noise(self, rules: Rules) -> None:
        """Refuse negative variances, and a mixture whose weights do not sum to 1; a mixture of one level is a number."""
        if isinstance(self.noise_var, float):
            rules.at_least(0, "noise_var")
            rules.at_most(LARGEST_SETTING, "noise_var")
            return
        pairs = bool(self.noise_var) and all(len(each) == 2 for each in self.noise_var)
        rules.require("noise_var", pairs, "must be a number or a list of [variance, weight]")
        small = all(max(each) <= LARGEST_SETTING for each in self.noise_var)
        rules.require("noise_var", small, f"must have variances of at most {LARGEST_SETTING:g}")
        positive = all(min(each) > 0 for each in self.noise_var)
        rules.require("noise_var", positive, "must have variances and weights above 0")
        total = sum(weight for _, weight in self.noise_var)
        one = abs(total - 1) <= WEIGHTS_SUM
        rules.require("noise_var", one, f"must have weights that sum to 1, not to {total:.6g}")
        if len(self.noise_var) == 1:
            object.__setattr__(self, "noise_var", self.noise_var[0][0])
            return
        for name, value in {"n_tasks": None, "drift": 1.0}.items():
            fixed = getattr(self, name) == value
            rule = f"must be a number if task.{name} is not {json.dumps(value)}"
            rules.require("noise_var", fixed, rule)

    def _check_drift(self, rules: Rules) -> None:
        """Refuse a drift outside (0, 1], and one of task vectors that are not Gaussian and new in every prompt."""
        rules.require("drift", 0 < self.drift <= 1, "must lie in (0, 1]")
        unused = {
            "supports": None,
            "sparsity": None,
            "n_sequences": None,
            "n_tasks": None,
            "shared_beta": False,
        }
        for name, value in unused.items():
            fixed = self.drift == 1 or getattr(self, name) == value
            rules.require("drift", fixed, f"must be 1 if task.{name} is not {json.dumps(value)}")

    def _check_sparsity(self, rules: Rules) -> None:
        """Refuse supports and laws of nonzero entries that no prompt can have."""
        rule = f"must list coordinates from 0 to {self.d_x - 1}, each once, for each of {self.d_y} responses"
        supports, known = self.supports or (), set(range(self.d_x))
        listed = all(
            support and set(support) <= known and len(set(support)) == len(support)
            for support in supports
        )
        holds = self.supports is None or (listed and len(supports) == self.d_y)
        rules.require("supports", holds, rule)
        rules.one_of("nonzeros", NONZEROS)
        sparse, signs = self.sparsity is not None, self.nonzeros == "signs"
        rules.require("nonzeros", sparse or not signs, "needs a task.sparsity")
        within = self.sparsity is None or 1 <= self.sparsity <= self.d_x
        rules.require("sparsity", within, f"must lie between 1 and d_x = {self.d_x}")
        apart = not sparse or self.supports is None
        rules.require("sparsity", apart, "cannot be combined with task.supports")
        rule = "must be null if task.nonzeros is 'signs' (it is then 1/sparsity)"
        rules.require("beta_var", self.beta_var is None or not signs, rule)

    @property
    def fields_in_words(self) -> dict[str, str]:
        """Fields that decide the prompts, as text; defaults with their value."""
        settings = {name: str(getattr(self, name)) for name in ("d_x", "d_y", "context_length")}
        default = " (1/sparsity)" if self.nonzeros == "signs" else " (1/d_x)"
        settings["covariance"] = self.covariance.in_words
        settings["beta_var"] = f"{self.beta_variance:.4g}{default if self.beta_var is None else ''}"
        settings["noise_var"] = self._noise_in_words
        if self.noise_var:
            settings["query_noise"] = "yes" if self.query_noise else "no"
        if self.supports is not None:
            settings["supports"] = ", ".join(f"({', '.join(map(str, s))})" for s in self.supports)
        elif self.d_y > 1:
            settings["supports"] = "all"
        if self.shared_beta and self.d_y > 1:
            settings["shared_beta"] = "yes"
        if self.sparsity is not None:
            settings |= {"sparsity": str(self.sparsity), "nonzeros": self.nonzeros}
        if self.n_sequences is not None:
            settings["n_sequences"] = str(self.n_sequences)
        if self.n_tasks is not None:
            settings |= {"n_tasks": str(self.n_tasks), "task_seed": str(self.task_seed)}
        if self.drift != 1:
            settings["drift"] = f"{self.drift:.4g}"
        return settings

    @property
    def _noise_in_words(self) -> str:
        if isinstance(self.noise_var, float):
            return f"{self.noise_var:.4g}"
        return " or ".join(f"{v:.4g} (weight {weight:.4g})" for v, weight in self.noise_var)

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that were passed."""
        return vars(self)["_given"]

    @property
    def assumed(self) -> tuple[str, ...]:
        """Names of the fields that were not stated and have defaults.

        Example:
            >>> "noise_var" in TaskConfig(d_x=4).assumed, "d_x" in TaskConfig(d_x=4).assumed
            (True, False)
        """
        return tuple(each.name for each in fields(self) if each.name not in self.given)

    @property
    def states_law(self) -> bool:
        """True if a field was stated that decides the law, such as noise_var; sizes alone do not.

        Example:
            >>> TaskConfig(d_x=4).states_law, TaskConfig(d_x=4, noise_var=0.5).states_law
            (False, True)
        """
        return bool(self.given & {each.name for each in fields(self)} - SIZES)

    def assuming(self, names: Collection[str]) -> "TaskConfig":
        """Copy with exactly these fields marked as assumed."""
        task = TaskConfig(**{each.name: getattr(self, each.name) for each in fields(self)})
        object.__setattr__(task, "_given", task.given - set(names))
        return task

    def pool(self) -> "Float[Tensor, 'task d_x d_y']":
        """Pool of task vectors, in float64; it depends on their law, n_tasks and task_seed only.

        Raises:
            ValueError: If the task has no pool.
        Source:
            Raventos et al. 2023, arXiv 2306.15063: M task vectors, drawn once.
        Example:
            >>> tuple(TaskConfig(d_x=3, n_tasks=16).pool().shape)
            (16, 3, 1)
        """
        from mechinterp.config.vectors import pool_of  # torch is slow to import

        if self.n_tasks is None:
            raise ValueError("task.n_tasks must be a number for a task with a pool, got null.")
        same: dict = {"context_length": 1, "covariance": CovarianceConfig(), "noise_var": 0.0}
        return pool_of(replace(self, **same, query_noise=True, n_sequences=None)).clone()

    @property
    def in_words(self) -> str:
        """The task in one line, with the names of its assumed fields.

        Example:
            >>> TaskConfig(noise_var=0).assuming(["d_x"]).in_words
            'd_x 5, d_y 1, context_length 40, covariance identity, beta_var 0.2 (1/d_x), noise_var 0; assumed: d_x'
        """
        words = self.fields_in_words
        unstated = ", ".join(name for name in words if name in self.assumed)
        line = ", ".join(f"{name} {value}" for name, value in words.items())
        return f"{line}; assumed: {unstated}" if unstated else line

    @property
    def beta_variance(self) -> float:
        """Variance of a nonzero entry of the task vector; the default is 1 / d_x, or 1 / s for
        signs."""
        if self.sparsity is not None and self.nonzeros == "signs":
            return 1 / self.sparsity
        return 1 / self.d_x if self.beta_var is None else self.beta_var

    @property
    def noise_levels(self) -> tuple[tuple[float, float], ...]:
        """Variances of the noise with their weights; one pair if the noise has one variance.

        Example:
            >>> TaskConfig().noise_levels, TaskConfig(noise_var=[[0.01, 0.5], [1, 0.5]]).noise_levels
            (((0.1, 1.0),), ((0.01, 0.5), (1.0, 0.5)))
        """
        return ((self.noise_var, 1.0),) if isinstance(self.noise_var, float) else self.noise_var

    @property
    def noise_variance(self) -> float:
        """Variance of the noise, mean over its levels; unit y^2."""
        if isinstance(self.noise_var, float):
            return self.noise_var
        return sum(variance * weight for variance, weight in self.noise_var)

    @property
    def posterior_penalty(self) -> float:
        """Penalty of Bayes-optimal ridge regression: noise variance / variance of an entry of the
        task vector. For a mixture of noise levels it is the best ridge regression with one penalty."""
        return self.noise_variance / (self._live * self.beta_variance)

    @property
    def _live(self) -> float:
        """Fraction of nonzero coordinates of a task vector, by sparsity."""
        return 1.0 if self.sparsity is None else self.sparsity / self.d_x

    @property
    def signal_var(self) -> float:
        """Variance of x . beta, mean over responses: beta_var times the trace of Sigma on a
        support, unit y^2."""
        diagonal = self.covariance.diagonal(self.d_x)
        supports = self.supports or (tuple(range(self.d_x)),)
        traces = [sum(diagonal[i] for i in support) for support in supports]
        return self._live * self.beta_variance * sum(traces) / len(traces)


TaskLike = TaskConfig | Mapping[str, object] | str | Path
"""A task, a dict of some of its fields, or a JSON file with them."""


def as_task(given: TaskLike, own: TaskConfig | None = None) -> TaskConfig:
    """A task; fields that a dict or a file leaves out come from `own` or the defaults, and stay
    assumed.

    Raises:
        ValueError: If it is not a task, or a field is unknown, of the wrong type or out of range.
    Example:
        >>> as_task({"noise_var": 0.5}, TaskConfig(d_x=3)).in_words
        'd_x 3, d_y 1, context_length 40, covariance identity, beta_var 0.3333 (1/d_x), noise_var 0.5, query_noise yes; assumed: d_y, context_length, covariance, beta_var, query_noise'
    """
    if isinstance(given, TaskConfig):
        return given
    values = task_fields(given)
    if own is None:
        return build(TaskConfig, values, "task.")
    task = build(TaskConfig, {**asdict(own), **values}, "task.")
    return task.assuming(set(own.assumed) - values.keys())


def task_fields(given: Mapping[str, object] | str | Path) -> dict[str, object]:
    """Fields of a task by name, from a dict or a JSON file.

    Raises:
        ValueError: If it is neither, or the file cannot be read.
    """
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str | Path):
        raise ValueError(
            f"task must be a TaskConfig, a dict of its fields or a JSON file, got {type(given).__name__}."
        )
    try:
        if not Path(given).is_file():
            raise ValueError("must be an existing file")
        if (size := Path(given).stat().st_size) > MAX_FILE:
            raise ValueError(f"must be at most {MAX_FILE} bytes, got {size}")
        values = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{given}: not a readable JSON file of a task ({reason}).") from None
    if not isinstance(values, dict):
        raise ValueError(f"{given}: must contain a JSON object, got {type(values).__name__}.")
    return values
