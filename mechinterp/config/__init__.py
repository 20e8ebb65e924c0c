"""What decides the numbers of an experiment: the task, the model, the training and the seed.

Configs are frozen, nested and JSON; they hold no device, no path and no verbosity. A config that
asks for something the package cannot do is refused when it is made.
"""

from mechinterp.config.experiment import (
    ExperimentConfig,
    differences,
    from_dict,
    override,
    value_of,
)
from mechinterp.config.model import CONTEXT_ONLY_SCORES, SCORES, ModelConfig
from mechinterp.config.task import CovarianceConfig, TaskConfig, TaskLike, as_task, task_fields
from mechinterp.config.train import TrainConfig

__all__ = [
    "CONTEXT_ONLY_SCORES",
    "SCORES",
    "CovarianceConfig",
    "ExperimentConfig",
    "ModelConfig",
    "TaskConfig",
    "TaskLike",
    "TrainConfig",
    "as_task",
    "differences",
    "from_dict",
    "override",
    "task_fields",
    "value_of",
]
