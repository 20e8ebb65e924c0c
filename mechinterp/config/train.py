"""Settings of training: steps, batches and the optimiser."""

from dataclasses import dataclass

from mechinterp.fields import Rules, set_checked

OPTIMIZERS = ("adam", "gradient_descent", "gradient_flow")


@dataclass(frozen=True)
class TrainConfig:
    """Minimisation of the mean squared error at the query; by default Adam with fresh prompts in
    every step."""

    steps: int = 500_001
    """Number of updates."""
    batch_size: int = 256
    """Number of prompts per step."""
    learning_rate: float = 1e-3
    """Step size; Adam's other constants are PyTorch's defaults. A gradient flow runs for 2 steps
    learning_rate units of its time tau, which corresponds to gradient descent with this step size.
    """
    data_seed: int = 0
    """Seed of the prompts; models with the same data_seed see the same prompts."""
    log_every: int = 1000
    """Number of steps between two rows of the history."""
    snapshot_every: int | None = None
    """Number of steps between two snapshots of the weights; None means steps 0, 1k, 2k, 5k, 10k,
    20k, 50k, ..."""
    n_eval_prompts: int = 4096
    """Number of fixed prompts for `eval_loss`."""
    optimizer: str = "adam"
    """"adam"; or, for one layer of linear attention, "gradient_descent" (full batch, on the
    population or a finite training set) or "gradient_flow" (exact, on the population). The last two
    train v, K and Q (or U) of every head."""
    init_std: float | None = None
    """Standard deviation of the initial v, K, Q or U of linear attention; None means PyTorch's
    default."""
    shortest_context: int | None = None
    """Smallest context length of a training step. All prompts of a step have one length, uniform
    between this and task.context_length; None means always task.context_length. Models trained by
    autograd only."""
    cosine: bool = False
    """True: the step size falls to 0 along half a cosine. False: it stays constant. Models trained
    by autograd only."""
    warm_up: int | None = None
    """Number of steps in which the step size rises linearly to its full value; None means none.
    Models trained by autograd only."""
    clip_norm: float | None = None
    """Largest norm of the gradient: longer gradients are scaled down to it; None means no limit.
    Models trained by autograd only."""

    def __post_init__(self) -> None:
        set_checked(self, "train")
        rules = Rules("train", self)
        rules.one_of("optimizer", OPTIMIZERS)
        if self.init_std is not None and self.init_std <= 0:
            raise ValueError(
                f"train.init_std must be > 0, got {self.init_std}: zero weights never move."
            )
        rules.at_least(1, "steps", "batch_size", "log_every", "n_eval_prompts")
        rules.at_least(0, "data_seed")
        rules.at_least(1, "snapshot_every", "shortest_context", "warm_up")
        rules.positive("learning_rate", "clip_norm")

    @property
    def snapshot_steps(self) -> tuple[int, ...]:
        """Steps (numbers of updates) at which the weights are saved, including 0."""
        if self.snapshot_every is not None:
            return tuple(range(0, self.steps + 1, self.snapshot_every))
        grid = (mantissa * 10**power for power in range(3, 19) for mantissa in (1, 2, 5))
        return (0, *(step for step in grid if step <= self.steps))
