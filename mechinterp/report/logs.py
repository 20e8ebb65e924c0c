"""Progress of a training as flat rows: to wandb, or as lines of JSON."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mechinterp.checkpoints.io.atomic import writing
from mechinterp.config import ExperimentConfig
from mechinterp.training.trained import Progress

OnLog = Callable[[Progress], None]


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
