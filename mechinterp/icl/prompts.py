"""Prompts of in-context linear regression, and their random generation.

A prompt has L pairs (x, y) of one linear task and a query x whose y is to be predicted. A batch of
prompts is a pure function of (seed, stream, step), so that runs can be resumed and models compared
on the same prompts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.config.vectors import generator_for
from mechinterp.icl.draws import data_of, number_sizes, responses_of
from mechinterp.icl.tables import fitting_tensors, rows_of_table
from mechinterp.memory import CHUNK_BYTES, prompt_bytes, require_memory

NO_LAW = "The law of the given prompts is unknown, so that no others can be drawn: state it by task= (--task)."
IDENTITY = CovarianceConfig()
OPTIONAL = ("beta", "drifting")
"""Tensors of prompts that may be unknown."""
Numbers = Callable[[int, torch.Generator], Tensor]
"""Function of a size and a generator that draws standard normal numbers."""


class NoTaskVectorsError(ValueError):
    """Error: given prompts have no task vectors, which an analysis needs."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """A batch of regression prompts.

    See also:
        `sample_prompts`.
    """

    x: Float[Tensor, "batch context d_x"]
    """Covariates of the context."""
    y: Float[Tensor, "batch context d_y"]
    """Noisy responses of the context."""
    x_query: Float[Tensor, "batch d_x"]
    """Covariates of the query."""
    y_query: Float[Tensor, "batch d_y"]
    """Target of training; it has noise unless `query_noise` is False."""
    y_query_clean: Float[Tensor, "batch d_y"]
    """Target without noise, x_query . beta; y_query if it is unknown."""
    beta: Float[Tensor, "batch d_x d_y"] | None
    """Task vectors; None if unknown, or if they drift."""
    drifting: Float[Tensor, "batch n_pairs d_x d_y"] | None = None
    """Task vectors of each pair and of the query, if they drift (`TaskConfig.drift`)."""

    @classmethod
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        x_query: ArrayLike,
        y_query: ArrayLike,
        beta: ArrayLike | None = None,
        y_query_clean: ArrayLike | None = None,
    ) -> "Prompts":
        """Prompts from your own data, numpy or torch; the axis of a single response may be missing.

        Args:
            x: Covariates [batch, L, d_x].
            y: Responses [batch, L, d_y], or [batch, L] for one response.
            x_query: Covariates of the query, [batch, d_x].
            y_query: Response of the query, [batch, d_y] or [batch].
            beta: Task vectors [batch, d_x, d_y] or [batch, d_x], if the targets are linear and the
                vectors are known.
            y_query_clean: Target without noise, [batch, d_y] or [batch]; None means x_query . beta.
                Without both, y_query is used, and every "excess risk" includes the noise.
        Raises:
            ValueError: If the shapes do not fit each other, or an entry is not finite.
        Example:
            >>> x, y = np.ones((8, 5, 3)), np.ones((8, 5))
            >>> Prompts.from_arrays(x, y, x[:, 0], y[:, 0])
            Prompts(8 of 5 pairs, d_x=3, d_y=1, torch.float64, without task vectors)
        """
        needed = {"x": x, "y": y, "x_query": x_query, "y_query": y_query}
        tensors = fitting_tensors(needed, {"beta": beta, "y_query_clean": y_query_clean})
        clean = tensors["y_query"]
        if "beta" in tensors:
            clean = (tensors["x_query"][:, None] @ tensors["beta"])[:, 0]
        return cls(**{"beta": None, "y_query_clean": clean, **tensors})  # type: ignore[arg-type]

    @classmethod
    def from_table(
        cls,
        x: ArrayLike,
        y: ArrayLike,
        *,
        context_length: int,
        n_prompts: int,
        seed: int = 0,
        standardise: bool = False,
    ) -> "Prompts":
        """Prompts of random rows of a table of data.

        A random quarter of the rows is for tests: queries are rows of it, and the pairs of a prompt
        are different rows of the others.

        Args:
            x: Covariates [row, d_x].
            y: Responses [row, d_y], or [row] for one response.
            context_length: Number of pairs of a prompt.
            seed: Seed of the split and of the rows.
            standardise: True: each column of x and y is shifted and scaled to mean 0 and variance 1
                over the rows that are not for tests.
        Raises:
            ValueError: If the shapes do not fit, an entry is not finite, there are too few rows for
                the pairs, or a column to be standardised is constant.
        Example:
            >>> x = np.random.default_rng(0).normal(size=(100, 3))
            >>> Prompts.from_table(x, x.sum(1), context_length=20, n_prompts=8)
            Prompts(8 of 20 pairs, d_x=3, d_y=1, torch.float64, without task vectors)
        """
        rows = rows_of_table(x, y, context_length, n_prompts, seed, standardise)
        return cls.from_arrays(*rows)

    def __post_init__(self) -> None:
        for name, tensor in vars(self).items():
            if not isinstance(tensor, Tensor) and not (tensor is None and name in OPTIONAL):
                raise ValueError(
                    f"Prompts.{name} must be a tensor, got {type(tensor).__name__}; Prompts.from_arrays takes arrays."
                )
            if tensor is not None:
                object.__setattr__(self, name, ordinary(tensor))

    def __repr__(self) -> str:
        batch, context, d_x = self.x.shape
        without = "" if self.knows_task_vectors else ", without task vectors"
        sizes = f"d_x={d_x}, d_y={self.y.shape[2]}, {self.x.dtype}"
        return f"Prompts({batch} of {context} pairs, {sizes}{without})"

    def __len__(self) -> int:
        return self.x.shape[0]

    def __getitem__(self, rows: slice | Int[Tensor, " chosen"]) -> "Prompts":
        return self._each(lambda tensor: tensor[rows])

    @property
    def context_tokens(self) -> Float[Tensor, "batch context d_model"]:
        """The pairs as tokens (x, y)."""
        return torch.cat([self.x, self.y], dim=-1)

    @property
    def tokens(self) -> Float[Tensor, "batch pos d_model"]:
        """The pairs as tokens (x, y), then the query as the token (x_query, 0)."""
        # The query sees no own label, so its y slot is 0.
        query = torch.cat([self.x_query, torch.zeros_like(self.y_query)], dim=-1)
        return torch.cat([self.context_tokens, query[:, None]], dim=1)

    @property
    def every_x(self) -> Float[Tensor, "batch n_pairs d_x"]:
        """Covariates of the context and of the query, in turn."""
        return torch.cat([self.x, self.x_query[:, None]], dim=1)

    @property
    def y_of_every_x(self) -> Float[Tensor, "batch n_pairs d_y"]:
        """Responses of the context's covariates and of the query, in turn: targets after 0 to L pairs."""
        return torch.cat([self.y, self.y_query[:, None]], dim=1)

    def prefix(self, n_pairs: int) -> "Prompts":
        """Prompts of the first `n_pairs` pairs, with the next covariate as the query.

        The clean target is x . beta, or y if the task vectors are unknown.

        Raises:
            ValueError: If they have fewer pairs.
        Example:
            >>> prompts = draw_prompts(TaskConfig(), 8)
            >>> prompts.prefix(3)
            Prompts(8 of 3 pairs, d_x=5, d_y=1, torch.float32)
        """
        most = self.x.shape[1]
        if not 0 <= n_pairs <= most:
            raise ValueError(f"n_pairs must lie in 0 to {most}, the pairs given, got {n_pairs}.")
        if n_pairs == most:
            return self
        x = self.x[:, n_pairs]
        y = self.y[:, n_pairs]
        vectors = None if self.drifting is None else self.drifting[:, : n_pairs + 1]
        beta = self.beta if vectors is None else vectors[:, -1]
        clean = y if beta is None else (x[:, None] @ beta)[:, 0]
        shorter = replace(self, x=self.x[:, :n_pairs], y=self.y[:, :n_pairs], drifting=vectors)
        return replace(shorter, x_query=x, y_query=y, y_query_clean=clean)

    def to(self, target: torch.device | str | torch.dtype) -> "Prompts":
        """The same prompts on another device or in another dtype."""
        return self._each(lambda tensor: tensor.to(target))

    def clone(self) -> "Prompts":
        """The same prompts in memory of their own, with the same strides, so that sums over them have the same bits;
        gradients flow to the first ones."""
        return self._each(_with_strides)

    def distinct(self) -> "Prompts":
        """The prompts without repetitions: the first of all rows with the same pairs in the same order and the same query.

        Example:
            >>> prompts = draw_prompts(TaskConfig(d_x=3), 8)
            >>> prompts[torch.arange(32) % 8].distinct()
            Prompts(8 of 40 pairs, d_x=3, d_y=1, torch.float32)
            >>> prompts.distinct() is prompts
            True
        """
        rows = distinct_rows(self)
        return self if len(rows) == len(self) else self[rows]

    def shortened(self, context_length: int) -> "Prompts":
        """The same prompts with their first `context_length` pairs only; with their last ones if the
        task drifts, so that the query still follows the last pair.

        Raises:
            ValueError: If they have fewer pairs.
        """
        most = self.x.shape[1]
        if not 1 <= context_length <= most:
            raise ValueError(
                f"context_length must lie in 1 to {most}, the pairs of the given prompts, got {context_length}."
            )
        if self.drifting is None:
            return replace(self, x=self.x[:, :context_length], y=self.y[:, :context_length])
        last = {name: getattr(self, name)[:, most - context_length :] for name in ("x", "y")}
        return replace(self, **last, drifting=self.drifting[:, most - context_length :])

    def require_sizes(self, *, d_x: int, d_y: int) -> None:
        """Refuse prompts whose d_x or d_y is not the model's.

        Raises:
            ValueError: If the sizes differ; the message names both.
        """
        sizes = (self.x.shape[2], self.y.shape[2])
        if sizes != (d_x, d_y):
            rule = f"The prompts' (d_x, d_y) must be the model's, {(d_x, d_y)}"
            raise ValueError(f"{rule}, got {sizes}.")

    def task_vectors(self, purpose: str) -> Float[Tensor, "batch d_x d_y"]:
        """Task vectors, which must be known and the same for all pairs.

        Raises:
            NoTaskVectorsError: If they are unknown or drift; the message names the purpose.
        """
        if self.drifting is not None:
            raise NoTaskVectorsError(
                f"{purpose} needs one task vector for all pairs of a prompt, but the task drifts (task.drift)."
            )
        if self.beta is None:
            raise NoTaskVectorsError(f"{purpose} needs the task vectors of the prompts; pass beta.")
        return self.beta

    @property
    def knows_task_vectors(self) -> bool:
        """True if the task vectors are known, whether they drift or not."""
        return self.beta is not None or self.drifting is not None

    def task_vectors_at_every_x(self, purpose: str) -> Float[Tensor, "batch n_pairs d_x d_y"]:
        """Task vectors of each pair and of the query, which must be known.

        Raises:
            NoTaskVectorsError: If they are unknown; the message names the purpose.
        """
        if self.drifting is not None:
            return self.drifting
        n_pairs = self.x.shape[1] + 1
        return self.task_vectors(purpose)[:, None].expand(-1, n_pairs, -1, -1)

    def y_without_noise(self, purpose: str) -> Float[Tensor, "batch context d_y"]:
        """Responses of the pairs without noise, from the task vectors, which must be known.

        Raises:
            NoTaskVectorsError: If they are unknown; the message names the purpose.
        """
        if self.drifting is None:
            return self.x @ self.task_vectors(purpose)
        return responses_of(self.x, self.drifting[:, :-1].to(self.x))

    def with_next_task(self, purpose: str) -> "Prompts":
        """The same covariates with the task vectors and the noise of the next prompt; y_query is that without noise.

        Raises:
            NoTaskVectorsError: If the task vectors are unknown; the message names the purpose.
        """
        noise = (self.y - self.y_without_noise(purpose)).roll(1, 0)
        beta = None if self.beta is None else self.beta.roll(1, 0)
        drifting = None if self.drifting is None else self.drifting.roll(1, 0)
        other = replace(self, beta=beta, drifting=drifting)
        at_query = other.task_vectors_at_every_x(purpose)[:, -1]
        clean = (self.x_query[:, None] @ at_query)[:, 0]
        y = other.y_without_noise(purpose) + noise
        return replace(other, y=y, y_query=clean, y_query_clean=clean)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Prompts":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Prompts(**{n: None if v is None else change(v) for n, v in values.items()})  # type: ignore[arg-type]


def distinct_rows(*prompts: Prompts) -> Int[Tensor, " row"]:
    """Rows of prompts without repetitions; of several prompts, rows that are equal in all of them are repetitions."""
    first = prompts[0].x_query
    if len({row.tobytes() for row in first.numpy(force=True)}) == len(first):
        return torch.arange(len(first), device=first.device)
    tokens = np.concatenate([each.tokens.flatten(1).numpy(force=True) for each in prompts], axis=1)
    rows = {row.tobytes(): at for at, row in reversed(list(enumerate(tokens)))}
    return torch.tensor(sorted(rows.values()), device=first.device)


def _with_strides(tensor: Tensor) -> Tensor:
    """A copy with the strides of the tensor; of an expanded one a plain copy."""
    if 0 in tensor.stride():
        return tensor.clone()
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor, copied if it was made in torch.inference_mode, so that it can be used with
    gradients."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def covariance_matrix(covariance: CovarianceConfig, d_x: int) -> Float[np.ndarray, "d_x d_x"]:
    """The covariance of the covariates as a float64 matrix.

    Example:
        >>> covariance_matrix(CovarianceConfig(kind="kms", rho=0.5), 2)
        array([[1. , 0.5],
               [0.5, 1. ]])
    """
    if covariance.kind == "kms":
        row = np.arange(d_x)
        return covariance.scale * covariance.rho ** np.abs(row[:, None] - row[None, :])
    if covariance.kind == "matrix":
        return covariance.scale * np.array(covariance.matrix)
    return np.diag(covariance.diagonal(d_x))


def draw_prompts(
    task: TaskConfig,
    n_prompts: int,
    *,
    seed: int = 0,
    generator: torch.Generator | None = None,
    context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    new_tasks: bool = False,
    numbers: Numbers | None = None,
) -> Prompts:
    """Prompts drawn from a random generator in a dtype, on the generator's device.

    The dtype changes the random numbers: analyses draw in float64, by `mechinterp.sample_prompts`.

    Args:
        seed: Seed of evaluation prompts, (seed, "eval", 0); unused if a generator is given.
        generator: Random generator, such as from `generator_for`.
        context_length: Number of pairs; None means the task's.
        new_tasks: True: prompts of a task with a pool get fresh task vectors instead of the pool's,
            with the same covariates and noise.
        numbers: Function that draws standard normal numbers in the dtype on the device; None: torch.
    Raises:
        ValueError: If n_prompts or context_length is below 1, the prompts do not fit into memory,
            or the task belongs to given prompts of unknown law.
    See also:
        `sample_prompts`.
    Example:
        >>> tuple(draw_prompts(TaskConfig(), 8, seed=1).tokens.shape)
        (8, 41, 6)
    """
    if getattr(task, "law", task) is None:  # a `PromptsTask` of unknown law
        raise ValueError(NO_LAW)
    if generator is None:
        generator = generator_for(seed, "eval", 0)
    length = task.context_length if context_length is None else context_length
    for name, value in (("n_prompts", n_prompts), ("context_length", length)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
    _require_memory_for(task, n_prompts, length, dtype.itemsize)
    # One draw for everything: starting the generator costs more than its numbers.
    size = n_prompts * sum(number_sizes(task, length))
    if numbers is None:
        normal = torch.empty(size, device=generator.device, dtype=dtype)
        normal.normal_(generator=generator)
    else:
        normal = numbers(size, generator)
    root = None
    if task.covariance != IDENTITY:
        root = np.linalg.cholesky(covariance_matrix(task.covariance, task.d_x))
    data = data_of(task, normal, length, generator, root=root, new_tasks=new_tasks)
    return Prompts(
        x=data.x[:, :-1],
        y=data.y[:, :-1],
        x_query=data.x[:, -1],
        y_query=data.y[:, -1] if task.query_noise else data.clean[:, -1],
        y_query_clean=data.clean[:, -1],
        beta=data.beta,
        drifting=data.drifting,
    )


def prompt_chunks(
    task: TaskConfig,
    n_prompts: int,
    *,
    seed: int,
    context_length: int | None = None,
    size: int = 8192,
    new_tasks: bool = False,
) -> Iterator[Prompts]:
    """Evaluation prompts in chunks that fit into memory; chunks of long prompts are smaller.

    Chunk i is drawn from (seed, "eval", i): a short evaluation uses the first chunks of a long one.

    Example:
        >>> [len(chunk) for chunk in prompt_chunks(TaskConfig(), 10_000, seed=0)]
        [8192, 1808]
    """
    # Closed-form learners need a matrix [d_x, d_x] for each prompt.
    per_prompt = prompt_bytes(task, context_length=context_length) + 4 * task.d_x**2
    size = min(size, max(1, CHUNK_BYTES // per_prompt))
    for chunk in range(0, n_prompts, size):
        generator = generator_for(seed, "eval", chunk // size)
        n = min(size, n_prompts - chunk)
        yield draw_prompts(
            task, n, generator=generator, context_length=context_length, new_tasks=new_tasks
        )


def _require_memory_for(task: TaskConfig, n_prompts: int, length: int, width: int) -> None:
    """Refuse prompts of numbers of `width` bytes that do not fit into memory."""
    # The drawn numbers, the covariates and responses made from them, and the tokens.
    needed = 3 * n_prompts * prompt_bytes(task, context_length=length, width=width)
    if task.drift != 1:
        needed += 2 * n_prompts * (length + 1) * task.d_x * task.d_y * width
    require_memory(needed, f"{n_prompts} prompts of {length} pairs with d_x = {task.d_x}")
