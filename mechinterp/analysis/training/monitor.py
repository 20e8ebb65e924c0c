"""Monitor of a module during a user's own training loop: loss and heads every few steps, on the
same prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
from torch import Tensor, nn

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.plain_modules import HookedModule, hook_module
from mechinterp.checkpoints.runs import head_rows, joined
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts


@dataclass(kw_only=True)
class Monitor:
    """Callable for a training loop, `monitor(step, module)`: stores loss, heads and a copy of the
    module.

    It measures a copy in evaluation mode and uses no shared random numbers, so that training is
    unaffected.

    Raises:
        ValueError: If `every` is below 1; when called, as in `hook_module`.
    See also:
        `hook_module`, `training_dynamics`.
    Example:
        >>> layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        >>> monitor = Monitor(task=TaskConfig(), every=10)
        >>> for step in range(21):
        ...     monitor(step, layer)  # and an update of your own
        >>> monitor.run().steps
        [0, 10, 20]
    """

    task: TaskConfig | None = None
    """Law of the prompts; None means the softmax paper's setting."""
    every: int = 1000
    """Number of steps between two measurements; calls at other steps return immediately."""
    read: Callable[[Tensor], Tensor] | None = None
    """Function from the module's output to the prediction; this and the next three fields are those
    of `hook_module`."""
    embed: Callable[[Prompts], Tensor] | None = None
    heads: int | None = None
    outputs: Sequence[str] = ()
    ablation: bool = True
    """True: every head is masked, for its share and the rise of the risk without it; one run of the
    module per head."""
    labels: bool = False
    """True: the module is classified at each saved step, which takes some dozen runs."""
    n_prompts: int = 256
    seed: int = 0
    snapshots: dict[int, HookedModule] = field(default_factory=dict, init=False, repr=False)
    """Copies of the module, by step."""
    rows: dict[int, pd.DataFrame] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every must be an integer >= 1, got {self.every!r}.")

    def __call__(self, step: int, module: nn.Module) -> None:
        """Measure the module if the number of updates so far is a multiple of `every`."""
        if step % self.every or step in self.snapshots:
            return
        hooked = hook_module(
            module,
            heads=self.heads,
            read=self.read,
            embed=self.embed,
            outputs=self.outputs,
            task=self.task,
        )
        prompts = evaluation_prompts(hooked, n_prompts=self.n_prompts, seed=self.seed)
        rows = head_rows(hooked, prompts, masks=self.ablation)
        if self.labels:
            rows["pattern"] = classify(hooked, n_prompts=self.n_prompts, seed=self.seed).pattern
        self.rows[step] = rows
        self.snapshots[step] = replace(hooked, step=step)

    def run(self) -> HookedModule:
        """The last copy of the module, a `Run` like that of `load_run`, with `history`,
        `snapshots`, `steps`, `step`, `at`.

        `history` has one row per step, layer and head: eval_loss, and share, rise or pattern if
        they are measured. loss, the training loss, is NaN.

        Raises:
            ValueError: If nothing has been measured.
        """
        if not self.rows:
            raise ValueError(f"Monitor must be called at a multiple of {self.every} steps first.")
        last = self.snapshots[max(self.snapshots)]
        return replace(last, history=joined(self.rows), snapshots=dict(self.snapshots))
