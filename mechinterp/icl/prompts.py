"""Prompts of in-context linear regression, and how they are drawn.

A prompt holds L pairs (x, y) of one linear task and a query x whose y is to be predicted. A batch of
prompts is a pure function of (seed, stream, step), so that a run can be resumed and models compared
on the same prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.memory import CHUNK_BYTES, prompt_bytes, require_memory

STREAMS = ("init", "train", "eval", "pool")
POOL_BLOCK = 1024
"""Task vectors of a pool that are drawn at once."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """A batch of regression prompts."""

    x: Float[Tensor, "batch context d_x"]
    """Covariates of the context."""
    y: Float[Tensor, "batch context d_y"]
    """Noisy responses of the context."""
    x_query: Float[Tensor, "batch d_x"]
    """Covariates of the query."""
    y_query: Float[Tensor, "batch d_y"]
    """Target of training; carries noise unless the task says otherwise."""
    y_query_clean: Float[Tensor, "batch d_y"]
    """x_query . beta, the target without noise."""
    beta: Float[Tensor, "batch d_x d_y"]
    """Task vectors."""

    def __post_init__(self) -> None:
        for name, tensor in vars(self).items():
            object.__setattr__(self, name, ordinary(tensor))

    def __repr__(self) -> str:
        batch, context, d_x = self.x.shape
        return (
            f"Prompts({batch} of {context} pairs, d_x={d_x}, d_y={self.y.shape[2]}, {self.x.dtype})"
        )

    def __len__(self) -> int:
        return self.x.shape[0]

    def __getitem__(self, rows: slice | Int[Tensor, " chosen"]) -> "Prompts":
        return Prompts(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @cached_property
    def context_tokens(self) -> Float[Tensor, "batch context d_model"]:
        """The pairs as tokens (x, y)."""
        return torch.cat([self.x, self.y], dim=-1)

    @property
    def tokens(self) -> Float[Tensor, "batch pos d_model"]:
        """The pairs as tokens (x, y), then the query as the token (x_query, 0)."""
        # The query sees no own label, so its y slot is 0.
        query = torch.cat([self.x_query, torch.zeros_like(self.y_query)], dim=-1)
        return torch.cat([self.context_tokens, query[:, None]], dim=1)

    def to(self, target: torch.device | str | torch.dtype) -> "Prompts":
        """The same prompts on another device or in another dtype."""
        return Prompts(**{f.name: getattr(self, f.name).to(target) for f in fields(self)})


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor; a copy that can take part in gradients if it was made in torch.inference_mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def generator_for(
    seed: int, stream: str, step: int, *, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A random generator whose state is a function of (seed, stream, step) alone.

    Raises:
        ValueError: If the stream is not one of "init", "train", "eval", "pool".
    Example:
        >>> first, again = (torch.rand(1, generator=generator_for(0, "train", 7)) for _ in range(2))
        >>> torch.equal(first, again)
        True
    """
    if stream not in STREAMS:
        raise ValueError(f"stream must be one of {', '.join(STREAMS)}, got {stream!r}.")
    entropy = np.random.SeedSequence([seed, STREAMS.index(stream), step])
    state = int(entropy.generate_state(1, np.uint64)[0])
    return torch.Generator(device=device).manual_seed(state)


def covariance_matrix(covariance: CovarianceConfig, d_x: int) -> Float[np.ndarray, "d_x d_x"]:
    """The covariance of the covariates as a float64 matrix.

    Example:
        >>> covariance_matrix(CovarianceConfig(kind="kms", rho=0.5), 2)
        array([[1. , 0.5],
               [0.5, 1. ]])
    """
    if covariance.kind == "kms":
        row = np.arange(d_x)
        return covariance.rho ** np.abs(row[:, None] - row[None, :])
    if covariance.kind == "eigenvalues":
        return np.diag(covariance.eigenvalues)
    return np.eye(d_x)


def support_mask(supports: Sequence[Sequence[int]], d_x: int) -> Float[Tensor, "d_x d_y"]:
    """1 where a response depends on a coordinate, else 0.

    Example:
        >>> support_mask(((0, 1), (1,)), 2)
        tensor([[1., 0.],
                [1., 1.]])
    """
    mask = torch.zeros(d_x, len(supports), dtype=torch.float32, device="cpu")
    for response, support in enumerate(supports):
        mask[list(support), response] = 1
    return mask


def random_support(
    like: Float[Tensor, "batch d_x d_y"], sparsity: int, *, generator: torch.Generator
) -> Float[Tensor, "batch d_x d_y"]:
    """1 at `sparsity` coordinates of each task vector, each choice of them equally likely, else 0.

    Example:
        >>> random_support(torch.zeros(2, 5, 1), 3, generator=generator_for(0, "eval", 0)).sum(1)
        tensor([[3.],
                [3.]])
    """
    # Drawn behind everything else, and in sparse tasks only: those of other tasks keep their bits.
    order = torch.rand(like.shape, generator=generator, dtype=torch.float32, device=like.device)
    live = order.topk(sparsity, dim=1).indices
    return torch.zeros_like(like).scatter_(1, live, 1.0)


def sample_prompts(
    task: TaskConfig,
    n_prompts: int,
    *,
    seed: int = 0,
    generator: torch.Generator | None = None,
    context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    new_tasks: bool = False,
) -> Prompts:
    """Fresh prompts of a task, on the generator's device.

    Args:
        seed: Of evaluation prompts, (seed, "eval", 0); not used where a generator is given.
        generator: What the prompts are drawn from; `generator_for` makes one.
        context_length: Number of pairs; None stands for the task's.
        new_tasks: Whether prompts of a task with a pool have fresh task vectors instead of the pool's; the
            covariates and the noise are the same.
    Raises:
        ValueError: If n_prompts or context_length is below 1, or the prompts do not fit into memory.
    Source:
        He et al. 2025, arXiv 2503.12734, section 2 (x ~ N(0, I), beta ~ N(0, I/d), noisy responses).
    Example:
        >>> tuple(sample_prompts(TaskConfig(), 8, seed=1).tokens.shape)
        (8, 41, 6)
    """
    if generator is None:
        generator = generator_for(seed, "eval", 0)
    length = task.context_length if context_length is None else context_length
    for name, value in (("n_prompts", n_prompts), ("context_length", length)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
    # The numbers that are drawn, covariates and responses made of them, and the tokens.
    width = dtype.itemsize
    needed = 3 * n_prompts * prompt_bytes(task, context_length=length, width=width)
    require_memory(needed, f"{n_prompts} prompts of {length} pairs with d_x = {task.d_x}")
    n_tokens = length + 1
    n_vectors = 1 if task.shared_beta else task.d_y
    sizes = [n_tokens * task.d_x, n_tokens * task.d_y, task.d_x * n_vectors]
    # One draw for everything: the generator's start-up costs more than its numbers.
    normal = torch.empty(n_prompts * sum(sizes), device=generator.device, dtype=dtype)
    normal.normal_(generator=generator)
    x_draw, noise_draw, beta_draw = normal.split([n_prompts * size for size in sizes])
    x_all = x_draw.view(n_prompts, n_tokens, task.d_x)
    if task.covariance.kind != "identity":
        root = np.linalg.cholesky(covariance_matrix(task.covariance, task.d_x))
        x_all = x_all @ torch.as_tensor(root.T, dtype=dtype, device=normal.device)
    if task.n_tasks is None or new_tasks:
        beta = _task_vectors(task, beta_draw.view(n_prompts, task.d_x, n_vectors), generator)
    else:
        # Drawn behind everything else: covariates and noise are those of fresh task vectors.
        shape, device = (n_prompts,), normal.device
        rows = torch.randint(task.n_tasks, shape, generator=generator, device=device)
        beta = _pool(_pool_key(task))[rows.cpu()].to(normal)
    noise = noise_draw.view(n_prompts, n_tokens, task.d_y) * task.noise_var**0.5
    clean = x_all @ beta
    y_all = clean + noise
    return Prompts(
        x=x_all[:, :-1],
        y=y_all[:, :-1],
        x_query=x_all[:, -1],
        y_query=y_all[:, -1] if task.query_noise else clean[:, -1],
        y_query_clean=clean[:, -1],
        beta=beta,
    )


def _task_vectors(
    task: TaskConfig, normal: Float[Tensor, "batch d_x vector"], generator: torch.Generator
) -> Float[Tensor, "batch d_x d_y"]:
    """Task vectors made of standard normal numbers, of one vector for all responses or one for each."""
    beta = normal
    if task.sparsity is not None:
        if task.nonzeros == "signs":
            beta = beta.sign()
        beta = beta * random_support(beta, task.sparsity, generator=generator)
    beta = beta * task.beta_variance**0.5
    beta = beta.expand(-1, -1, task.d_y)
    if task.supports is not None:
        beta = beta * support_mask(task.supports, task.d_x).to(beta)
    return beta


def task_pool(task: TaskConfig) -> Float[Tensor, "task d_x d_y"]:
    """The pool of task vectors that the prompts of a task are drawn from, in float64.

    It is a function of the law of the task vectors, n_tasks and task_seed alone.

    Raises:
        ValueError: If the task has no pool.
    Source:
        Raventos et al. 2023, arXiv 2306.15063: M task vectors, drawn once.
    Example:
        >>> pool = task_pool(TaskConfig(d_x=3, n_tasks=16))
        >>> prompts = sample_prompts(TaskConfig(d_x=3, n_tasks=16), 8, dtype=torch.float64)
        >>> bool((prompts.beta[:, None] == pool).all((2, 3)).any(1).all())
        True
    """
    if task.n_tasks is None:
        raise ValueError("task.n_tasks must be a number for a task with a pool, got null.")
    return _pool(_pool_key(task)).clone()


def _pool_key(task: TaskConfig) -> TaskConfig:
    """The task with everything at its default that its pool does not depend on."""
    return replace(
        task,
        context_length=1,
        covariance=CovarianceConfig(),
        noise_var=0.0,
        query_noise=True,
        n_sequences=None,
    )


@lru_cache(maxsize=8)
def _pool(task: TaskConfig) -> Float[Tensor, "task d_x d_y"]:
    assert task.n_tasks is not None
    n_vectors = 1 if task.shared_beta else task.d_y
    blocks = []
    for block in range(-(-task.n_tasks // POOL_BLOCK)):
        generator = generator_for(task.task_seed, "pool", block)
        shape = (POOL_BLOCK, task.d_x, n_vectors)
        normal = torch.empty(shape, dtype=torch.float64, device="cpu").normal_(generator=generator)
        blocks.append(_task_vectors(task, normal, generator))
    return torch.cat(blocks)[: task.n_tasks]


def prompt_chunks(
    task: TaskConfig,
    n_prompts: int,
    *,
    seed: int,
    context_length: int | None = None,
    size: int = 8192,
    new_tasks: bool = False,
) -> Iterator[Prompts]:
    """Evaluation prompts in chunks, so that a million of them fit into memory; of long prompts in smaller ones.

    Chunk i is drawn from (seed, "eval", i): the first chunks of a long evaluation are those of a short one.

    Example:
        >>> [len(chunk) for chunk in prompt_chunks(TaskConfig(), 10_000, seed=0)]
        [8192, 1808]
    """
    # Closed-form learners make a matrix [d_x, d_x] of each prompt.
    per_prompt = prompt_bytes(task, context_length=context_length) + 4 * task.d_x**2
    size = min(size, max(1, CHUNK_BYTES // per_prompt))
    for chunk in range(0, n_prompts, size):
        generator = generator_for(seed, "eval", chunk // size)
        n = min(size, n_prompts - chunk)
        yield sample_prompts(
            task, n, generator=generator, context_length=context_length, new_tasks=new_tasks
        )
