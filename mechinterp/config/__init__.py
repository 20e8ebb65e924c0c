"""Config of an experiment: the task, the model, the training and the seed.

Configs are frozen, nested and JSON. They contain no device, path or verbosity. A config that the
package cannot train is refused when it is created.
"""

from mechinterp.config.covariance import CovarianceConfig
from mechinterp.config.experiment import (
    ExperimentConfig,
    differences,
    from_dict,
    override,
    value_of,
)
from mechinterp.config.model import CONTEXT_ONLY_SCORES, SCORES, ModelConfig
from mechinterp.config.task import TaskConfig, TaskLike, as_task, task_fields
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
