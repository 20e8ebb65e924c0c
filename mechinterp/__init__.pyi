"""The public names with their types, for editors and type checkers; __init__.py reads them here and loads them when they are first used."""

from mechinterp.analysis.ablation.ablate import ablate as ablate
from mechinterp.analysis.ablation.pruning import prune as prune
from mechinterp.analysis.check import check as check
from mechinterp.analysis.circuits import circuits as circuits
from mechinterp.analysis.comparison import models_frame as models_frame
from mechinterp.analysis.learners.compare import compare_learners as compare_learners
from mechinterp.analysis.learners.error_curve import error_curve as error_curve
from mechinterp.analysis.learners.priors import compare_priors as compare_priors
from mechinterp.analysis.multi_layer.naming import name_algorithm as name_algorithm
from mechinterp.analysis.one_layer.attention import attention_patterns as attention_patterns
from mechinterp.analysis.one_layer.classify import classify as classify
from mechinterp.analysis.one_layer.classify import classify_circuits as classify_circuits
from mechinterp.analysis.one_layer.linear_components import (
    linear_components as linear_components,
)
from mechinterp.analysis.one_layer.thresholds import Thresholds as Thresholds
from mechinterp.analysis.over_steps import over_steps as over_steps
from mechinterp.analysis.patching.activations import patch_activations as patch_activations
from mechinterp.analysis.patching.circuit import circuit_faithfulness as circuit_faithfulness
from mechinterp.analysis.patching.edges import attribute_edges as attribute_edges
from mechinterp.analysis.probing.p_probe import p_probe as p_probe
from mechinterp.analysis.probing.probe import probe as probe
from mechinterp.analysis.response.response import response as response
from mechinterp.analysis.training.history import history as history
from mechinterp.analysis.training.jumps import jump_forecast as jump_forecast
from mechinterp.analysis.training.learning_coefficient import (
    local_learning_coefficient as local_learning_coefficient,
)
from mechinterp.analysis.training.monitor import Monitor as Monitor
from mechinterp.analysis.training.sampler import Chains as Chains
from mechinterp.checkpoints.checkpoint import Checkpoint as Checkpoint
from mechinterp.checkpoints.foreign.recurrent import recurrent_module as recurrent_module
from mechinterp.checkpoints.load import load as load
from mechinterp.checkpoints.modules.hooked import hook_module as hook_module
from mechinterp.config import CovarianceConfig as CovarianceConfig
from mechinterp.config import ExperimentConfig as ExperimentConfig
from mechinterp.config import ModelConfig as ModelConfig
from mechinterp.config import TaskConfig as TaskConfig
from mechinterp.config import TrainConfig as TrainConfig
from mechinterp.config import override as override
from mechinterp.icl.prompts import Prompts as Prompts
from mechinterp.models.hooked.runner import masked as masked
from mechinterp.models.hooked.transformer import ICLTransformer as ICLTransformer
from mechinterp.models.run.evaluation import sample_prompts as sample_prompts
from mechinterp.models.run.predictor import predictor_of as predictor_of
from mechinterp.paper import save_figure as save_figure
from mechinterp.presets import preset as preset
from mechinterp.progress import show_progress as show_progress
from mechinterp.report.hub import push_to_hub as push_to_hub
from mechinterp.report.page import write_report as write_report
from mechinterp.training.train import train as train
from mechinterp.training.train import train_models as train_models
from mechinterp.version import __version__ as __version__
