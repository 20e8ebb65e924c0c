"""A `Monitor` in Hugging Face's Trainer."""

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mechinterp.analysis.training.monitor import Monitor


class HuggingFaceCallback(TrainerCallback):
    """Callback for `Trainer(callbacks=[HuggingFaceCallback(monitor)])`: measures at the start and after
    every `monitor.every` updates, on the main process.

    See also:
        `Monitor`.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **others: object,
    ) -> None:
        """Measure the model before the first update."""
        if model is not None and state.is_world_process_zero:
            self.monitor(state.global_step, model)

    on_step_end = on_train_begin
