"""Progress of a command: bars on standard error, and rows for wandb or a file."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from mechinterp.checkpoints.io.files import printable, writing
from mechinterp.config import ExperimentConfig
from mechinterp.display import counted
from mechinterp.progress import Item, show_progress
from mechinterp.training.run import OnLog, Progress


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """Progress bar of a training on standard error, with steps per second and time left; yields its `on_log` function.
    A terminal shows it from the start: a large sweep takes half a minute to its first logged step.

    Args:
        quiet: True: nothing is shown.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Bar(*columns, console=Console(stderr=True), disable=quiet, redirect_stdout=_shown())
    if bar.console.is_terminal and not quiet:
        bar.start()
        bar.add_task("preparing", total=None)
        bar.live.transient = True

    def show(progress: Progress) -> None:
        bar.live.transient = False
        if not bar.tasks:
            bar.start()
            bar.add_task("")
        left = timedelta(seconds=round(progress.seconds_left))
        models = counted(progress.n_models, "model")
        text = f"{models}, loss {progress.loss:.4f}, {progress.steps_per_second:.0f} steps/s, {left} left"
        bar.update(bar.task_ids[0], completed=progress.step, total=progress.steps, description=text)
        # A lone model has no name of its own, and the error that follows says the same.
        for name in () if quiet or progress.diverged == (".",) else progress.diverged:
            bar.console.print(
                f"{printable(name)} has diverged: its loss is not finite at step {progress.step}",
                markup=False,
            )

    try:
        yield show
    finally:
        if bar.tasks:
            bar.stop()


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[None]:
    """Context with progress bars on standard error, one per loop of an analysis, with the time left; removed when the loop is done.

    Args:
        quiet: True: nothing is shown. Bars are never shown if standard error is not a terminal.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal

    bar = Bar(*columns, console=console, transient=True, disable=hidden, redirect_stdout=_shown())

    def shown(items: Sequence[Item], text: str) -> Iterable[Item]:
        task = bar.add_task(text, total=len(items))
        try:
            yield from bar.track(items, task_id=task)
        finally:
            bar.remove_task(task)

    with bar, show_progress(shown):
        yield


def _shown() -> bool:
    """True if standard output is a terminal, so that printed lines must go above the bar."""
    return sys.stdout.isatty()


@contextmanager
def logged(where: str | None, config: ExperimentConfig, show: OnLog) -> Iterator[OnLog]:
    """Function that shows the progress and also logs it.

    Args:
        where: "wandb", a file that ends in .jsonl, or None: nothing is logged.
        show: Function that shows the progress.
    Raises:
        ValueError: If it is neither, or wandb is not installed.
    """
    if where is None:
        yield show
    elif where == "wandb":
        try:
            import wandb
        except ModuleNotFoundError:
            raise ValueError("--log wandb needs wandb: pip install wandb.") from None
        with wandb.init(project="mechinterp", config=config.to_dict()) as run:
            yield _both(show, run.log)
    elif where.endswith(".jsonl"):
        with writing(Path(where)), Path(where).open("a", encoding="utf-8", buffering=1) as stream:
            yield _both(show, lambda row: stream.write(json.dumps(row) + "\n"))
    else:
        raise ValueError(f"--log must be wandb or a file that ends in .jsonl, got {where!r}.")


def _both(show: OnLog, log: Callable[[dict], object]) -> OnLog:
    def on_log(progress: Progress) -> None:
        show(progress)
        row = {"icl/step": progress.step, "icl/training_loss": progress.loss}
        log(row | {"icl/steps_per_second": progress.steps_per_second})

    return on_log
