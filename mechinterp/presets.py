"""Configs of published settings, by name."""

from dataclasses import replace

from mechinterp.config import (
    CovarianceConfig,
    ExperimentConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
)

_FOUR, _EIGHT = (0.4, 0.3, 0.2, 0.1), tuple(value / 36 for value in range(8, 0, -1))
"""Eigenvalues of the linear-attention paper."""
_SPARSE = TrainConfig(steps=50_000, batch_size=64, schedule="cosine", clip_norm=1.0)
_POOL_TASK = TaskConfig(d_x=4, context_length=8, noise_var=0.25, beta_var=1.0, n_tasks=16)
"""Pool of tasks after Raventos et al. 2023 (arXiv 2306.15063), but with d_x 4 in place of 8."""
_GARG_TRAIN = TrainConfig(
    steps=500_001,
    batch_size=64,
    learning_rate=1e-4,
    loss="every",
    curriculum_every=2000,
    curriculum_d_x=5,
    curriculum_length=10,
)
_RECURRENT = {"gla-h1": "gated", "gated-delta-h1": "gated_delta", "mesa-h1": "mesa"}
"""Scores of recurrent layers by preset."""


def preset(name: str) -> ExperimentConfig:
    """Config of a published setting; `PRESETS` lists the names.

    Raises:
        ValueError: If the name is unknown.
    See also:
        `override`, `train`.
    Example:
        >>> preset("softmax-h4").model.n_heads
        4
    """
    if name not in PRESETS:
        raise ValueError(f"Preset must be one of {', '.join(PRESETS)}, got {name!r}.")
    return PRESETS[name]


def _linear(
    eigenvalues: tuple[float, ...],
    *,
    n_heads: int,
    rank: int | None,
    init_std: float,
    train: TrainConfig,
) -> ExperimentConfig:
    """Setting of the linear-attention paper; rank None means merged heads.

    init_std and the learning rate are those of the paper's code, which sums over the N pairs of a
    context. The paper's text and this package take the mean. A head multiplies n weights, so the
    values are scaled by N^(1/n) and N^(2/n).
    """
    N = 31
    factor = N ** (1 / (2 if rank is None else 3))
    return ExperimentConfig(
        task=TaskConfig(
            d_x=len(eigenvalues),
            context_length=N,
            covariance=CovarianceConfig(kind="eigenvalues", eigenvalues=eigenvalues),
            beta_var=1.0,
            noise_var=0.0,
        ),
        model=ModelConfig(n_heads=n_heads, d_head=rank, score="linear/L", merged_qk=rank is None),
        train=replace(
            train,
            optimizer="gradient_flow",
            learning_rate=train.learning_rate * factor**2,
            init_std=init_std * factor,
        ),
    )


def _gpt2(width: int, *, n_layers: int, n_heads: int, n_pairs: int) -> ModelConfig:
    """GPT-2 on tokens in turn, with room for this number of pairs and a query."""
    return ModelConfig(
        n_layers=n_layers,
        n_heads=n_heads,
        d_model=width,
        d_head=width // n_heads,
        d_mlp=4 * width,
        activation="gelu_new",
        norm="before",
        final_norm=True,
        biases=True,
        attend_to_self=True,
        layout="in_turn",
        n_positions=2 * (n_pairs + 1),
    )


PRESETS: dict[str, ExperimentConfig] = {
    # He et al. 2025 (arXiv 2503.12734), common setting: the defaults of the configs.
    **{f"softmax-h{h}": ExperimentConfig(model=ModelConfig(n_heads=h)) for h in (1, 2, 3, 4, 8)},
    # Zhang et al. 2025 (arXiv 2501.16265), figures 1, 3 and 4, on the population, with the time axis of the figures.
    "linear-merged": _linear(
        _FOUR,
        n_heads=8,
        rank=None,
        init_std=1e-6,
        train=TrainConfig(steps=8000, learning_rate=1e-3, log_every=50, snapshot_every=500),
    ),
    "linear-separate": _linear(
        _FOUR,
        n_heads=5,
        rank=1,
        init_std=1e-2,
        train=TrainConfig(steps=20_000, learning_rate=2e-2, log_every=100, snapshot_every=200),
    ),
    **{
        f"linear-rank-{rank}": _linear(
            _EIGHT,
            n_heads=9,
            rank=rank,
            init_std=5e-3,
            train=TrainConfig(steps=50_000, learning_rate=2e-2, log_every=500, snapshot_every=500),
        )
        for rank in (1, 2, 4, 8)
    },
    # Sparse regression with four layers of linear attention. The setting is ours; the published one is
    # unknown to us.
    **{
        f"sparse-h{h}": ExperimentConfig(
            task=TaskConfig(d_x=16, context_length=40, sparsity=4, nonzeros="signs"),
            model=ModelConfig(
                n_layers=4, n_heads=h, d_model=64, score="linear/L", context_only=True
            ),
            train=replace(_SPARSE, shortest_context=8),
        )
        for h in (1, 4, 8)
    },
    # d_x / s = 16, with as many heads as coordinates: here a few steps on reweighted covariates beat
    # plain steps.
    "sparse-wide": ExperimentConfig(
        task=TaskConfig(d_x=64, context_length=128, sparsity=4, nonzeros="signs", noise_var=0.25),
        model=ModelConfig(
            n_layers=4, n_heads=64, d_head=2, d_model=144, score="linear/L", context_only=True
        ),
        train=replace(_SPARSE, shortest_context=32),
    ),
    # The smallest GPT-2 of Garg et al. 2022 on a pool.
    "pool-gpt2": ExperimentConfig(
        task=_POOL_TASK,
        model=_gpt2(64, n_layers=3, n_heads=2, n_pairs=8),
        train=TrainConfig(
            steps=20_000, loss="every", schedule="cosine", warm_up=500, clip_norm=1.0, log_every=250
        ),
    ),
    # Garg et al. 2022 (arXiv 2208.01066), the defaults of their code: tiny and small GPT-2.
    **{
        f"garg-{name}": ExperimentConfig(
            task=TaskConfig(d_x=20, context_length=40, beta_var=1.0, noise_var=0.0),
            model=_gpt2(width, n_layers=n_layers, n_heads=n_heads, n_pairs=100),
            train=_GARG_TRAIN,
        )
        for name, width, n_layers, n_heads in (("tiny", 64, 3, 2), ("small", 128, 6, 4))
    },
    # Raventos et al. 2023 (arXiv 2306.15063), the example of their code; and a small setting of ours.
    "raventos-d8": ExperimentConfig(
        task=TaskConfig(d_x=8, context_length=15, noise_var=0.25, beta_var=1.0, n_tasks=2**10),
        model=_gpt2(128, n_layers=8, n_heads=2, n_pairs=15),
        train=TrainConfig(steps=500_000, loss="every", schedule="triangle", warm_up=250_000),
    ),
    "raventos-d4": ExperimentConfig(
        task=replace(_POOL_TASK, n_tasks=2**6),
        model=_gpt2(64, n_layers=4, n_heads=2, n_pairs=8),
        train=TrainConfig(steps=50_000, loss="every", schedule="triangle", warm_up=25_000),
    ),
    # Linear attention only. Its predictions after few pairs have heavy tails, so every prompt has all 8 pairs.
    "pool-linear": ExperimentConfig(
        task=_POOL_TASK,
        model=ModelConfig(n_layers=3, n_heads=4, d_model=32, score="linear/L", context_only=True),
        train=TrainConfig(
            steps=5000, batch_size=256, log_every=250, schedule="cosine", clip_norm=1.0
        ),
    ),
    # One recurrent layer, trained at every x. The setting is ours.
    **{
        name: ExperimentConfig(
            task=TaskConfig(d_x=5, context_length=20),
            model=ModelConfig(n_heads=1, score=score),
            train=TrainConfig(
                steps=2000,
                batch_size=64,
                learning_rate=3e-3,
                loss="every",
                schedule="cosine",
                clip_norm=1.0,
                log_every=250,
            ),
        )
        for name, score in _RECURRENT.items()
    },
}
"""Configs by name."""
