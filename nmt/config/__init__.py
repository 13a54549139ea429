"""The schema of all settings: one dataclass for each section and each command. No torch and no Hydra here.

The files under configs/ only give values. A value that cannot work is refused when a dataclass is built, with the key,
the value and the remedy.
"""

from nmt.config.commands import (
    BLEU_TOKENIZERS,
    COMMANDS,
    IMMUTABLE,
    NON_NUMERIC,
    PRECISIONS,
    AlignRun,
    EvaluateRun,
    TrainRun,
    TranslateRun,
    flatten_keys,
    immutable_settings,
)
from nmt.config.data import BOS, EOS, PAD, UNK, CorpusConfig, DataConfig, DataOverride, TokenizerConfig
from nmt.config.model import AttentionConfig, ModelConfig
from nmt.config.search import LinksConfig, SearchConfig
from nmt.config.training import MONITOR_FLOORS, MONITORS, OPTIMIZERS, SCHEDULES, OptimConfig, TrainConfig

__all__ = [
    "BLEU_TOKENIZERS",
    "BOS",
    "COMMANDS",
    "EOS",
    "MONITOR_FLOORS",
    "NON_NUMERIC",
    "IMMUTABLE",
    "MONITORS",
    "OPTIMIZERS",
    "PAD",
    "PRECISIONS",
    "SCHEDULES",
    "UNK",
    "AlignRun",
    "AttentionConfig",
    "CorpusConfig",
    "DataConfig",
    "DataOverride",
    "EvaluateRun",
    "LinksConfig",
    "ModelConfig",
    "OptimConfig",
    "SearchConfig",
    "TokenizerConfig",
    "TrainConfig",
    "TrainRun",
    "TranslateRun",
    "flatten_keys",
    "immutable_settings",
]
