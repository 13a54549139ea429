"""Settings of training: the optimizer, its schedule and the loop."""

from dataclasses import dataclass

from nmt.config.fields import setting
from nmt.errors import UserError, check_above_zero, check_at_least, check_choices, check_fraction

OPTIMIZER_NAMES = ("adam", "adamw", "sgd")
LR_SCHEDULES = ("constant", "inverse_sqrt", "cosine", "plateau")
MONITOR_METRICS = {"bleu": True, "loss": False, "ppl": False, "accuracy": True}  # True: higher is better
MONITOR_FLOORS = {"bleu": 0.005, "accuracy": 0.0005}  # lower values are shown as 0: the model has not learned anything


@dataclass(slots=True)
class OptimConfig:
    """Optimizer and learning rate schedule."""

    name: str = setting("adam", "optimizer: adam | adamw | sgd")
    lr: float = setting(0.001, "peak learning rate")
    schedule: str = setting(
        "constant", "constant | inverse_sqrt | cosine | plateau (half the rate after a validation without improvement)"
    )
    warmup: int = setting(0, "steps of linear warm-up")
    label_smoothing: float = setting(0.1, "probability mass spread over the vocabulary")
    clip: float | None = setting(1.0, "maximum gradient norm; null: no clipping")
    weight_decay: float = setting(0.0, "L2 penalty for adam and sgd, decoupled for adamw")

    def __post_init__(self) -> None:
        check_choices("optim.", self, name=OPTIMIZER_NAMES, schedule=LR_SCHEDULES)
        check_above_zero("optim.", self, "lr", "clip")
        check_at_least(0, "optim.", self, "warmup", "weight_decay")
        check_fraction("optim.", self, "label_smoothing")
        if self.schedule == "inverse_sqrt" and self.warmup == 0:
            raise UserError("optim.schedule=inverse_sqrt needs optim.warmup=1 or more")


@dataclass(slots=True)
class TrainConfig:
    """Training loop, batches, checkpoints and auxiliary losses."""

    max_steps: int | None = setting(None, "maximum number of updates; null: no limit")
    max_epochs: int | None = setting(20, "maximum number of epochs; null: no limit; not used with data.streaming")
    batch_tokens: int = setting(1500, "pieces per update over all processes: sum of max(source, target) of its pairs")
    batch_sentences: int | None = setting(None, "sentences per update, instead of batch_tokens")
    accumulate: int = setting(1, "micro-batches per update, which divide its pairs to save memory")
    validate_every: int | None = setting(None, "steps between validations; null: once per epoch")
    save_minutes: float | None = setting(10.0, "minutes between checkpoints; null: only at validations")
    log_every: int = setting(50, "steps between log lines")
    monitor: str = setting("bleu", "metric for the best checkpoint and train.patience: bleu | loss | ppl | accuracy")
    coverage_loss: float = setting(0.0, "weight of the coverage loss (See et al. 2017), for attention.coverage")
    r_drop: float = setting(0.0, "weight of the R-Drop loss between two dropout passes (Liang et al. 2021); 0: off")
    guided_alignment: float = setting(0.0, "weight, at the end, of the loss against gold links (data.alignments)")
    patience: int | None = setting(None, "early stopping after this many validations without improvement; null: never")
    keep: int = setting(1, "number of best checkpoints to keep, besides the last two")

    def __post_init__(self) -> None:
        check_choices("train.", self, monitor=MONITOR_METRICS)
        check_at_least(1, "train.", self, "max_steps", "max_epochs", "batch_tokens", "log_every", "keep", "accumulate")
        check_at_least(1, "train.", self, "batch_sentences", "validate_every", "patience")
        check_above_zero("train.", self, "save_minutes")
        check_at_least(0, "train.", self, "coverage_loss", "r_drop", "guided_alignment")
        if self.max_steps is None and self.max_epochs is None:
            raise UserError("train.max_steps and train.max_epochs are both null: training never ends; set one of them")
