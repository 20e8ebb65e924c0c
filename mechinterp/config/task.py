"""The task: the law of the prompts."""

from collections.abc import Collection
from dataclasses import dataclass, field

from mechinterp.fields import MAX_SIZE, Rules, set_checked

COVARIANCES = ("identity", "kms", "eigenvalues")
NONZEROS = ("gaussian", "signs")
MOST_NUMBERS = 8
"""Eigenvalues that are told one by one."""


@dataclass(frozen=True)
class CovarianceConfig:
    """Covariance Sigma of the covariates."""

    kind: str = "identity"
    """"identity", "kms" (Kac-Murdock-Szego, Sigma_ij = rho^|i-j|) or "eigenvalues" (a diagonal Sigma)."""
    rho: float = 0.0
    """Correlation of neighbouring coordinates, used by "kms"."""
    eigenvalues: tuple[float, ...] = ()
    """The d_x diagonal entries, used by "eigenvalues"."""

    @property
    def in_words(self) -> str:
        """The kind and its numbers.

        Example:
            >>> CovarianceConfig("eigenvalues", eigenvalues=(1, 0.25)).in_words
            'diagonal (1, 0.25)'
        """
        if self.kind == "kms":
            return f"kms with rho {self.rho:.4g}"
        if self.kind == "identity":
            return self.kind
        values = self.eigenvalues
        if len(values) > MOST_NUMBERS:
            return f"diagonal, {len(values)} numbers from {min(values):.4g} to {max(values):.4g}"
        return f"diagonal ({', '.join(f'{value:.4g}' for value in values)})"

    def __post_init__(self) -> None:
        set_checked(self, "task.covariance")
        rules = Rules("task.covariance", self)
        rules.one_of("kind", COVARIANCES)
        values, given = self.eigenvalues, self.kind == "eigenvalues"
        rules.require("rho", not self.rho or self.kind == "kms", "is used by kind 'kms' only")
        rules.require("eigenvalues", not values or given, "are used by kind 'eigenvalues' only")
        rules.require("rho", -1 < self.rho < 1, "must lie in (-1, 1)")
        positive = bool(values) and min(values) > 0
        rules.require("eigenvalues", positive or not given, "must be positive numbers")


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
    n_tasks: int | None = None
    """Size M of a fixed pool that the task vectors of prompts are drawn from, uniformly; None: fresh ones."""
    task_seed: int = 0
    """Seed of the pool; of one seed a smaller pool is the beginning of a larger one."""

    def __post_init__(self) -> None:
        set_checked(self, "task")
        rules = Rules("task", self)
        rules.at_least(1, "d_x", "d_y", "context_length")
        rules.at_most(MAX_SIZE, "d_x", "d_y", "context_length")
        rules.at_least(0, "noise_var")
        rules.positive("beta_var")
        eigenvalues = self.covariance.eigenvalues
        if self.covariance.kind == "eigenvalues" and len(eigenvalues) != self.d_x:
            raise ValueError(
                f"task.covariance.eigenvalues must hold d_x = {self.d_x} numbers, got {len(eigenvalues)}."
            )
        self._check_supports()
        self._check_sparsity(rules)
        rules.at_least(1, "n_sequences", "n_tasks")
        rules.at_least(0, "task_seed")
        rules.at_most(MAX_SIZE, "n_tasks")
        if self.task_seed and self.n_tasks is None:
            raise ValueError(f"task.task_seed needs a task.n_tasks, got {self.task_seed} and null.")

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

    def _check_sparsity(self, rules: Rules) -> None:
        rules.one_of("nonzeros", NONZEROS)
        if self.sparsity is None:
            if self.nonzeros != "gaussian":
                raise ValueError(
                    f"task.nonzeros {self.nonzeros!r} needs a task.sparsity, got null."
                )
            return
        signs = self.nonzeros == "signs"
        within = 1 <= self.sparsity <= self.d_x
        rules.require("sparsity", within, f"must lie between 1 and d_x = {self.d_x}")
        rule = "is not used where task.supports are given"
        rules.require("sparsity", self.supports is None, rule)
        rule = "is 1/sparsity where task.nonzeros is 'signs' and must be null"
        rules.require("beta_var", self.beta_var is None or not signs, rule)

    @property
    def told(self) -> dict[str, str]:
        """The fields that decide what prompts are drawn, in words, each default with its number."""
        settings = {name: str(getattr(self, name)) for name in ("d_x", "d_y", "context_length")}
        default = " (1/sparsity)" if self.nonzeros == "signs" else " (1/d_x)"
        settings["covariance"] = self.covariance.in_words
        settings["beta_var"] = f"{self.beta_variance:.4g}{default if self.beta_var is None else ''}"
        settings["noise_var"] = f"{self.noise_var:.4g}"
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
        return settings

    def in_words(self, assumed: Collection[str] = ()) -> str:
        """The whole task in one line.

        Args:
            assumed: Names of the fields that nobody stated.
        Example:
            >>> TaskConfig(noise_var=0).in_words(["noise_var"])
            'd_x 5, d_y 1, context_length 40, covariance identity, beta_var 0.2 (1/d_x), noise_var 0; assumed: noise_var'
        """
        told = self.told
        unstated = ", ".join(name for name in told if name in assumed)
        line = ", ".join(f"{name} {value}" for name, value in told.items())
        return f"{line}; assumed: {unstated}" if unstated else line

    @property
    def beta_variance(self) -> float:
        """Variance of an entry of the task vector that is not held at zero, with the default filled in."""
        if self.sparsity is not None and self.nonzeros == "signs":
            return 1 / self.sparsity
        return 1 / self.d_x if self.beta_var is None else self.beta_var

    @property
    def posterior_penalty(self) -> float:
        """Penalty of ridge regression: noise variance over the variance of an entry of the task vector."""
        return self.noise_var / (self._live * self.beta_variance)

    @property
    def _live(self) -> float:
        """Share of the coordinates that a response depends on, as far as sparsity decides."""
        return 1.0 if self.sparsity is None else self.sparsity / self.d_x

    @property
    def signal_var(self) -> float:
        """Variance of x . beta, the mean over responses: beta_var times the trace of Sigma on a support, unit y^2."""
        given = self.covariance.kind == "eigenvalues"
        diagonal = self.covariance.eigenvalues if given else (1.0,) * self.d_x
        supports = self.supports or (tuple(range(self.d_x)),)
        traces = [sum(diagonal[i] for i in support) for support in supports]
        return self._live * self.beta_variance * sum(traces) / len(traces)
