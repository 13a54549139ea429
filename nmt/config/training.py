"""Settings of training: the optimizer, its schedule and the loop."""

from dataclasses import dataclass

from nmt.errors import UserError, check_above_zero, check_at_least, check_choice, check_share

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "inverse_sqrt", "cosine", "plateau")
MONITORS = {"bleu": True, "loss": False, "ppl": False, "accuracy": True}  # whether higher is better
MONITOR_FLOORS = {"bleu": 0.005, "accuracy": 0.0005}  # below these the log shows 0: a model that has not learned yet


@dataclass(slots=True)
class OptimConfig:
    name: str = "adam"  # adam | adamw | sgd
    lr: float = 0.001  # the highest learning rate
    schedule: str = "constant"  # constant | inverse_sqrt | cosine | plateau
    warmup: int = 0  # steps of linear growth
    decay: float = 0.5  # plateau: factor at each validation that brings nothing better
    label_smoothing: float = 0.1  # share of the target probability spread over the vocabulary
    clip: float | None = 1.0  # largest norm of the gradient; null: none
    weight_decay: float = 0.0  # of Adam and SGD as a part of the gradient, of AdamW apart from it

    def __post_init__(self) -> None:
        check_choice("optim.name", self.name, OPTIMIZERS)
        check_choice("optim.schedule", self.schedule, SCHEDULES)
        check_above_zero("optim.", self, "lr", "clip", "decay")
        check_at_least(0, "optim.", self, "warmup", "weight_decay")
        check_share("optim.label_smoothing", self.label_smoothing)
        if self.decay >= 1:
            raise UserError(f"optim.decay={self.decay} must be below 1")
        if self.decay != 0.5 and self.schedule != "plateau":
            raise UserError(f"optim.decay={self.decay} is of optim.schedule=plateau; write both, or neither")
        if self.schedule == "inverse_sqrt" and self.warmup == 0:
            raise UserError("optim.schedule=inverse_sqrt needs optim.warmup of at least 1 step")


@dataclass(slots=True)
class TrainConfig:
    max_steps: int | None = None  # updates; null: no limit
    max_epochs: int | None = 20  # whichever of the two comes first ends training; a stream only max_steps
    batch_tokens: int = 1500  # per update: the sum of max(source, target) pieces, without padding
    batch_sentences: int | None = None  # a number of sentences instead
    accumulate: int = 1  # micro-batches that an update's batch is divided into
    validate_every: int | None = None  # steps; null: each epoch
    save_every: int | None = None  # steps; null: at each validation, and by the clock
    save_minutes: float | None = 10.0  # ... when so many have passed since the last checkpoint; null: never
    log_every: int = 50  # steps
    monitor: str = "bleu"  # what is best, and what early stopping watches: bleu | loss | ppl | accuracy
    coverage_loss: float = 0.0  # its weight in the loss (See et al. 2017); needs model.attention.coverage
    r_drop: float = 0.0  # R-Drop (Liang et al. 2021): weight of what tells two passes with other dropout apart
    guided_alignment: float = 0.0  # a loss on how far attention is from gold links (data.alignments): its last weight
    patience: int | None = None  # validations without a better one before training stops; null: never
    keep: int = 1  # best checkpoints kept beside the last two
    max_skipped: int = 20  # updates in a row whose loss or gradient is not finite, before training stops

    def __post_init__(self) -> None:
        check_choice("train.monitor", self.monitor, MONITORS)
        check_at_least(1, "train.", self, "max_steps", "max_epochs", "batch_tokens", "log_every", "keep", "accumulate")
        check_at_least(1, "train.", self, "batch_sentences", "validate_every", "save_every", "patience", "max_skipped")
        check_above_zero("train.", self, "save_minutes")
        check_at_least(0, "train.", self, "coverage_loss", "r_drop", "guided_alignment")
        if self.max_steps is None and self.max_epochs is None:
            raise UserError("train.max_steps and train.max_epochs are both null; training needs an end: set one")
