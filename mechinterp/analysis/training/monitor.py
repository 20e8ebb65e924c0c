"""Monitor of a module during a user's own training loop: loss and heads every few steps, on the
same prompts."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.foreign.settings import TASK_KEY
from mechinterp.checkpoints.io.files import write_new, writing
from mechinterp.checkpoints.modules.hooked import HookedModule, hook_module
from mechinterp.checkpoints.runs import head_rows, joined
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts


@dataclass(kw_only=True)
class Monitor:
    """Callable for a training loop, `monitor(step, module)`: stores loss, heads and a copy of the
    module, and reports them with `log`.

    It measures a copy in evaluation mode and uses no shared random numbers, so that training is
    unaffected.

    Raises:
        ValueError: If `every` is below 1; when called, as in `hook_module`.
        CheckpointError: When called, if a file of `log` or `keep` cannot be written or is there.
    See also:
        `hook_module`, `history`.
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
    n_heads: int | None = None
    outputs: Sequence[str] = ()
    ablation: bool = True
    """True: every head is masked, for its share and the rise of the risk without it; one run of the
    module per head."""
    labels: bool = False
    """True: the module is classified at each saved step, which takes some dozen runs."""
    n_prompts: int = 256
    seed: int = 0
    log: Callable[[dict], object] | str | Path | None = None
    """Function of a flat dict, such as `wandb.log`, called at each measurement; or a file to which
    the dict is added as a line of JSON. Its names are `icl/step`, `icl/loss`, `icl/ridge` (loss of
    ridge regression on the same prompts), for each head `icl/L0H1/rise` and so on, and for a module
    that predicts at every x in one pass `icl/loss_at_3` (after 3 pairs) and so on."""
    keep: str | Path | None = None
    """Folder for the module's state dict at each measured step, `step_<n>.pt`, and a config.json
    with the number of heads and the task. `load` reads them; the copies are then not kept in
    memory."""
    snapshots: dict[int, HookedModule] = field(default_factory=dict, init=False, repr=False)
    """Copies of the module, by step; with `keep` the last one only."""
    rows: dict[int, pd.DataFrame] = field(default_factory=dict, init=False, repr=False)
    module: nn.Module = field(default_factory=nn.Module, init=False, repr=False)
    """Module of the last measurement with `keep`, itself and no copy."""

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every must be an integer >= 1, got {self.every!r}.")
        if not (self.log is None or callable(self.log) or isinstance(self.log, str | Path)):
            raise ValueError(f"log must be a function of a dict or a file, got {self.log!r}.")

    def __call__(self, step: int, module: nn.Module) -> None:
        """Measure the module if the number of updates so far is a multiple of `every`."""
        if step % self.every or step in self.rows:
            return
        hooked = self._hooked(module)
        prompts = evaluation_prompts(hooked, n_prompts=self.n_prompts, seed=self.seed)
        rows = head_rows(hooked, prompts, masks=self.ablation)
        if self.labels:
            rows["pattern"] = classify(hooked, n_prompts=self.n_prompts, seed=self.seed).label
        if self.keep is not None:
            self.module, file = getattr(module, "_orig_mod", module), self._file(step)
            with writing(file):
                write_new(file, partial(torch.save, self.module.state_dict()))
                self._write_settings(file.with_name("config.json"), hooked)
            self.snapshots.clear()
        self.rows[step] = rows
        self.snapshots[step] = replace(hooked, step=step)
        if self.log is not None:
            best = ridge(prompts, penalty=hooked.task.posterior_penalty)
            loss = float((best - prompts.y_query).square().mean())
            self._log(flat_row(step, rows) | {"icl/ridge": loss})

    def run(self) -> HookedModule:
        """The last copy of the module, a `Run` like that of `load`, with `history`,
        `snapshots`, `steps`, `step`, `at`.

        `history` has one row per step, layer and head: eval_loss, and share, rise or pattern if
        they are measured. loss, the training loss, is NaN.

        Raises:
            ValueError: If nothing has been measured.
        """
        if not self.rows:
            raise ValueError(f"Monitor must be called at a multiple of {self.every} steps first.")
        last = self.snapshots[max(self.snapshots)]
        snapshots: Mapping[int, HookedModule] = dict(self.snapshots)
        if self.keep is not None:
            files = {step: self._file(step) for step in self.rows}
            snapshots = KeptModules(files, self.module, self._hooked)
        return replace(last, history=joined(self.rows), snapshots=snapshots)

    def _hooked(self, module: nn.Module) -> HookedModule:
        return hook_module(
            module,
            n_heads=self.n_heads,
            read=self.read,
            embed=self.embed,
            outputs=self.outputs,
            task=self.task,
        )

    def _file(self, step: int) -> Path:
        return Path(self.keep or ".") / f"step_{step}.pt"

    def _write_settings(self, file: Path, hooked: HookedModule) -> None:
        """Settings that the weights do not show, for `load`; an existing file stays."""
        if not file.exists():
            task = {n: v for n, v in asdict(hooked.task).items() if n not in hooked.task.assumed}
            settings = {"n_heads": hooked.hooked.n_heads, TASK_KEY: task}
            write_new(
                file, lambda target: target.write_text(json.dumps(settings), encoding="utf-8")
            )

    def _log(self, row: dict[str, object]) -> None:
        if callable(self.log):
            self.log(row)
            return
        file = Path(str(self.log))
        with writing(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def flat_row(step: int, rows: pd.DataFrame) -> dict[str, object]:
    """Measurement of one step as a flat dict.

    Example:
        >>> rows = {"layer": [0], "head": [1], "eval_loss": [0.5], "eval_loss_sem": [0.1], "rise": [2.0]}
        >>> flat_row(7, pd.DataFrame(rows))
        {'icl/step': 7, 'icl/loss': 0.5, 'icl/loss_sem': 0.1, 'icl/L0H1/rise': 2.0}
    """
    first = rows.iloc[0]
    row: dict[str, object] = {"icl/step": step}
    row |= {"icl/loss": float(first["eval_loss"]), "icl/loss_sem": float(first["eval_loss_sem"])}
    if "pattern" in rows:
        row["icl/pattern"] = first["pattern"]
    every = [name for name in rows if name.startswith("eval_loss_at_")]
    row |= {name.replace("eval_", "icl/"): float(first[name]) for name in every}
    for name in ("share", "rise", "rise_sem"):
        if name in rows:
            heads = zip(rows["layer"], rows["head"], rows[name], strict=True)
            row |= {f"icl/L{layer}H{head}/{name}": float(value) for layer, head, value in heads}
    return row


@dataclass(frozen=True, eq=False)
class KeptModules(Mapping[int, HookedModule]):
    """Hooked copies of a module at each step, read from their files when they are used."""

    files: Mapping[int, Path]
    module: nn.Module
    """A module of the same shapes."""
    hook: Callable[[nn.Module], HookedModule]

    def __getitem__(self, step: int) -> HookedModule:
        module = copy.deepcopy(self.module)
        module.load_state_dict(torch.load(self.files[step], weights_only=True))
        return replace(self.hook(module), step=step)

    def __iter__(self) -> Iterator[int]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)
