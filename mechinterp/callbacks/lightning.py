"""A `Monitor` in Lightning's Trainer."""

from lightning.pytorch import Callback, LightningModule, Trainer

from mechinterp.analysis.training.monitor import Monitor


class LightningCallback(Callback):
    """Callback for `Trainer(callbacks=[LightningCallback(monitor)])`: measures at the start and after
    every `monitor.every` updates, on the main process.

    Args:
        part: Name of the module to measure inside the LightningModule, such as "model"; empty: the
            LightningModule itself.
    See also:
        `Monitor`.
    """

    def __init__(self, monitor: Monitor, part: str = "") -> None:
        self.monitor, self.part = monitor, part

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule, *others: object) -> None:
        """Measure the module before the first update."""
        if trainer.is_global_zero:
            self.monitor(trainer.global_step, pl_module.get_submodule(self.part))

    on_train_batch_end = on_train_start
