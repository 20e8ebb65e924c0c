"""Settings of a training."""

import math
from dataclasses import dataclass

from mechinterp.fields import Rules, set_checked

OPTIMIZERS = ("adam", "gradient_descent", "gradient_flow")
_LOSSES = ("query", "every")
SCHEDULES = (None, "cosine", "one_cycle", "triangle")


@dataclass(frozen=True)
class TrainConfig:
    """Minimisation of the mean squared error; by default at the query, by Adam, with fresh prompts
    in every step."""

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
    schedule: str | None = None
    """Change of the step size during training; None: it stays constant. "cosine": it falls to 0 along half a
    cosine. "one_cycle": PyTorch's OneCycleLR. "triangle": it rises and falls linearly, between 0
    and 0. Models trained by autograd only."""
    warm_up: int | None = None
    """Number of steps in which the step size rises to its full value; None means none, or .3 of all
    steps for "one_cycle" and half of them for "triangle". Models trained by autograd only."""
    clip_norm: float | None = None
    """Largest norm of the gradient: longer gradients are scaled down to it; None means no limit.
    Models trained by autograd only."""
    weight_decay: float | None = None
    """Decoupled weight decay, which makes Adam AdamW; None means none. Models trained by autograd
    only."""
    loss: str = "query"
    """"query": the squared error at the query. "every": its mean over all positions with an x, each
    predicted from the pairs before it, in one pass; for causal models whose tokens come in turn and
    for one recurrent layer."""
    first_position: bool = True
    """True: the loss at every position includes the first one, which has no pairs before it."""
    curriculum_every: int | None = None
    """Number of steps after which prompts get one more coordinate and two more pairs, up to the
    task's; None means no curriculum. Coordinates of x beyond the current number are 0. Models
    trained by autograd only."""
    curriculum_d_x: int | None = None
    """Number of coordinates in the first stage of the curriculum; None means all."""
    curriculum_length: int | None = None
    """Number of pairs in the first stage of the curriculum; None means all."""

    def __post_init__(self) -> None:
        set_checked(self, "train")
        rules = Rules("train", self)
        rules.one_of("optimizer", OPTIMIZERS)
        rules.one_of("loss", _LOSSES)
        rules.one_of("schedule", SCHEDULES)
        rules.at_least(1, "steps", "batch_size", "log_every", "n_eval_prompts")
        rules.at_least(0, "data_seed")
        rules.at_least(1, "snapshot_every", "shortest_context", "warm_up")
        rules.at_least(1, "curriculum_every", "curriculum_d_x", "curriculum_length")
        rules.positive("learning_rate", "clip_norm", "weight_decay", "init_std")
        at_query = self.loss == "query"
        rules.require("first_position", self.first_position or not at_query, "needs loss 'every'")
        rule = "is not used by loss 'every', which has all lengths"
        rules.require("shortest_context", at_query or self.shortest_context is None, rule)
        for name in ("curriculum_d_x", "curriculum_length"):
            used = self.curriculum_every is not None or getattr(self, name) is None
            rules.require(name, used, "needs curriculum_every")
        rule = "is not used with shortest_context, which draws the length"
        free = self.curriculum_length is None or self.shortest_context is None
        rules.require("curriculum_length", free, rule)
        rising = self.schedule in ("one_cycle", "triangle")
        rule = f"must be < steps = {self.steps} for schedule {self.schedule!r}"
        short = not rising or self.warm_up is None or self.warm_up < self.steps
        rules.require("warm_up", short, rule)

    @property
    def first_counted(self) -> int | None:
        """Least number of pairs before a position that counts in the loss; None: the query alone."""
        return None if self.loss == "query" else 0 if self.first_position else 1

    def step_size(self, step: int) -> float:
        """Step size of the update after `step` updates.

        Example:
            >>> train = TrainConfig(steps=100, learning_rate=1.0, schedule="triangle")
            >>> [train.step_size(step) for step in (0, 25, 50, 75)]
            [0.0, 0.5, 1.0, 0.5]
        """
        steps, warm_up, factor = self.steps, self.warm_up, 1.0
        if self.schedule == "triangle":
            top = warm_up or steps / 2
            factor = step / top if step < top else (steps - step) / (steps - top)
        elif self.schedule == "one_cycle":
            # The constants of torch.optim.lr_scheduler.OneCycleLR.
            low, lowest, top = 1 / 25, 1 / 25e4, (warm_up or 0.3 * steps) - 1
            if step <= top:
                factor = _between(low, 1.0, step / top if top else 1.0)
            else:
                factor = _between(1.0, lowest, (step - top) / (steps - 1 - top))
        else:
            if self.schedule == "cosine":
                factor = 0.5 * (1 + math.cos(math.pi * step / steps))
            if warm_up is not None:
                factor *= min(1.0, (step + 1) / warm_up)
        return self.learning_rate * factor

    def stage(self, step: int, *, d_x: int, context_length: int) -> tuple[int, int]:
        """Numbers of coordinates and of pairs of the prompts of a step.

        Source:
            Garg et al. 2022, arXiv 2208.01066, for the steps of the curriculum.
        Example:
            >>> train = TrainConfig(curriculum_every=2000, curriculum_d_x=5, curriculum_length=10)
            >>> [train.stage(step, d_x=20, context_length=40) for step in (0, 2000, 40_000)]
            [(5, 10), (6, 12), (20, 40)]
        """
        if self.curriculum_every is None:
            return d_x, context_length
        number = step // self.curriculum_every
        first = (self.curriculum_d_x or d_x, self.curriculum_length or context_length)
        return min(d_x, first[0] + number), min(context_length, first[1] + 2 * number)

    @property
    def snapshot_steps(self) -> tuple[int, ...]:
        """Steps (numbers of updates) at which the weights are saved, including 0."""
        if self.snapshot_every is not None:
            return tuple(range(0, self.steps + 1, self.snapshot_every))
        grid = (mantissa * 10**power for power in range(3, 19) for mantissa in (1, 2, 5))
        return (0, *(step for step in grid if step <= self.steps))


def _between(start: float, end: float, share: float) -> float:
    """Value on half a cosine from `start` to `end`."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
