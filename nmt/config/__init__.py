"""Schema of all settings: one dataclass per section and per command, without torch or Hydra.

The YAML files under configs/ only set values. Building a dataclass validates it; a `UserError` names the key, the value
and the remedy.
"""

from nmt.config.commands import (
    BLEU_TOKENIZERS,
    COMMANDS,
    IMMUTABLE_KEYS,
    NON_NUMERIC_KEYS,
    PRECISIONS,
    TRAINING_PRECISIONS,
    AlignRun,
    EvaluateRun,
    ExportRun,
    ServeRun,
    TrainRun,
    TranslateRun,
    WatchRun,
    flatten_keys,
    select_immutable_settings,
)
from nmt.config.data import (
    BOS,
    EOS,
    PAD,
    SIDES,
    UNK,
    AugmentConfig,
    CorpusConfig,
    DataConfig,
    DataOverride,
    TokenizerConfig,
)
from nmt.config.model import AttentionConfig, ModelConfig, SelfAttentionConfig
from nmt.config.prepare import CleaningConfig, PrepareRun
from nmt.config.search import LinksConfig, SearchConfig
from nmt.config.training import LR_SCHEDULES, MONITOR_FLOORS, MONITOR_METRICS, OPTIMIZER_NAMES, OptimConfig, TrainConfig
