"""The public names with their types, for editors and type checkers; __init__.py loads them when they are first used."""

from mechinterp.analysis.circuits.attention import attention_patterns as attention_patterns
from mechinterp.analysis.circuits.circuits import circuits as circuits
from mechinterp.analysis.circuits.patterns import classify as classify
from mechinterp.analysis.circuits.patterns import classify_circuits as classify_circuits
from mechinterp.analysis.dynamics.jumps import jump_forecast as jump_forecast
from mechinterp.analysis.dynamics.learning_coefficient import (
    local_learning_coefficient as local_learning_coefficient,
)
from mechinterp.analysis.dynamics.linear_snapshots import linear_snapshots as linear_snapshots
from mechinterp.analysis.dynamics.milestones import milestones as milestones
from mechinterp.analysis.dynamics.plateaus import plateaus as plateaus
from mechinterp.analysis.dynamics.prior_snapshots import prior_snapshots as prior_snapshots
from mechinterp.analysis.dynamics.snapshots import training_snapshots as training_snapshots
from mechinterp.analysis.dynamics.training import training_dynamics as training_dynamics
from mechinterp.analysis.heads.ablation import ablate_heads as ablate_heads
from mechinterp.analysis.heads.edges import attribute_edges as attribute_edges
from mechinterp.analysis.heads.fine_tuning import fine_tune as fine_tune
from mechinterp.analysis.heads.gates import learn_gates as learn_gates
from mechinterp.analysis.heads.pairs import ablate_pairs as ablate_pairs
from mechinterp.analysis.heads.pairs import greedy_order as greedy_order
from mechinterp.analysis.heads.patching import patch_positions as patch_positions
from mechinterp.analysis.heads.prior_heads import prior_heads as prior_heads
from mechinterp.analysis.heads.pruning import prune as prune
from mechinterp.analysis.heads.subsets import ablate_subsets as ablate_subsets
from mechinterp.analysis.learners.algorithm import name_algorithm as name_algorithm
from mechinterp.analysis.learners.algorithm_steps import intervene_on_steps as intervene_on_steps
from mechinterp.analysis.learners.fits import fit_learners as fit_learners
from mechinterp.analysis.learners.layered import classify_layers as classify_layers
from mechinterp.analysis.learners.priors import compare_priors as compare_priors
from mechinterp.analysis.probing.p_probing import p_probe as p_probe
from mechinterp.analysis.probing.probes import probe_layers as probe_layers
from mechinterp.analysis.results import sweep_frame as sweep_frame
from mechinterp.checkpoints.loading import load as load
from mechinterp.checkpoints.plain_modules import hook_module as hook_module
from mechinterp.config import ExperimentConfig as ExperimentConfig
from mechinterp.config import ModelConfig as ModelConfig
from mechinterp.config import TaskConfig as TaskConfig
from mechinterp.config import override as override
from mechinterp.icl.pools import dmmse as dmmse
from mechinterp.icl.prompts import Prompts as Prompts
from mechinterp.icl.prompts import generator_for as generator_for
from mechinterp.icl.prompts import sample_prompts as sample_prompts
from mechinterp.icl.prompts import task_pool as task_pool
from mechinterp.models.adapter import masked as masked
from mechinterp.models.conformance import check_compatible as check_compatible
from mechinterp.models.evaluation import evaluation_prompts as evaluation_prompts
from mechinterp.models.masks import mask_heads as mask_heads
from mechinterp.models.predictor import predictor_of as predictor_of
from mechinterp.models.transformer import ICLTransformer as ICLTransformer
from mechinterp.presets import preset as preset
from mechinterp.report.page import write_report as write_report
from mechinterp.training.sweep import train as train
from mechinterp.training.sweep import train_models as train_models
from mechinterp.version import __version__ as __version__
