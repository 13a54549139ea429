"""The training loop: plain functions on one `TrainState`.

Randomness is stateless: torch's generator is reseeded at each micro-batch from (seed, step, micro-batch), and the order
of the data is a function of (seed, epoch), so a checkpoint stores positions, and resuming is exact.
"""

import dataclasses
import hashlib
import json
import math
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm

from nmt.checkpoint import (
    OPTIMISER,
    STATE,
    delete_all_but,
    last_checkpoint,
    load_tensors,
    load_weights,
    restore,
    save_checkpoint,
    verify,
)
from nmt.config import SearchConfig, TrainConfig, TrainRun
from nmt.data.batching import EncodedPairs, assemble, epoch_batches, micro_batches, padding_waste, sent
from nmt.data.corpus import column
from nmt.data.tokenizer import Tokenizer
from nmt.distributed import deferred_signals, log, release_memory
from nmt.errors import UserError
from nmt.files import finite, write_atomically
from nmt.metrics import bleu
from nmt.model.loss import Loss
from nmt.model.maps import wide
from nmt.model.seq2seq import Seq2Seq
from nmt.objective import Differentiate, differentiate, replayed
from nmt.optim import clip, learning_rate
from nmt.translator import Translator, warn_of_reach
from nmt.validation import evaluate_loss

HIGHER_IS_BETTER = {"bleu": True, "accuracy": True, "loss": False, "ppl": False}


@dataclass(slots=True)
class Progress:
    """How far training has come: all that a checkpoint stores beside tensors."""

    corpus: str  # key of the training and validation text, as tokenised
    step: int = 0  # updates made
    epoch: int = 0  # the present one, from 0
    position: int = 0  # batches of the present epoch done
    best: list[tuple[float, int]] = field(default_factory=list)  # (score, step) of the best checkpoints, best first
    judged: int = -1  # step of the last validation
    waiting: int = 0  # validations since the last better one
    decays: int = 0  # plateaus of the learning rate
    seconds: float = 0.0  # spent in training steps


@dataclass(slots=True)
class TrainState:
    """What a run works with."""

    run: TrainRun
    folder: Path
    device: torch.device
    model: Seq2Seq
    tokenizer: Tokenizer
    optimiser: torch.optim.Optimizer
    train: EncodedPairs
    valid: Dataset
    progress: Progress
    board: Any = None  # TensorBoard's writer, where its extra is installed
    differentiate: Differentiate = field(init=False)  # of this run and this model

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.differentiate = replayed(self.run, self.model)
        else:
            self.differentiate = partial(differentiate, self.run, self.model)


def seed_of(*numbers: int) -> int:
    """One seed from several numbers, well mixed and the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7], "big")


# -------------------------------------------------------------------------------------------------------------- loop
def fit(state: TrainState) -> float:
    """Train to the end that the settings give. Returns the best validation score.

    SIGINT and SIGTERM end it after a step, saved but not judged: resumed, it is as if nothing had happened.

    Raises:
        SystemExit: 128 + the signal's number.
        UserError: the loss is no number any more.
    """
    run, progress = state.run, state.progress
    batches = epoch_batches(state.train, run.train, run.seed, progress.epoch)
    last_step = horizon(run.train, len(batches))
    log.info(f"{len(batches)} updates an epoch, {last_step} in all; padding {padding_waste(state.train, batches):.1%}")
    warn_of_reach(state.model, state.train.source_lengths, "training pairs")
    if finished(state, last_step):
        more = "train.max_epochs or train.max_steps" if progress.step >= last_step else "train.patience"
        log.info(f"{state.folder} is finished already; a larger {more} goes on")
    window = Window(state)
    with (
        deferred_signals() as signals,
        tqdm(total=last_step, initial=progress.step, unit=" steps", disable=None) as bar,
    ):
        while not finished(state, last_step):
            if progress.position == len(batches):
                progress.epoch, progress.position = progress.epoch + 1, 0
                batches = epoch_batches(state.train, run.train, run.seed, progress.epoch)
            window.add(*train_step(state, batches[progress.position], last_step))
            progress.position += 1
            bar.update()

            epoch_ends = progress.position == len(batches)
            due = progress.step % run.train.validate_every == 0 if run.train.validate_every else epoch_ends
            due = due or progress.step == last_step
            if progress.step % run.train.log_every == 0 or due:
                bar.set_postfix_str(window.report(last_step, quiet=not bar.disable))
            if due:
                judge(state, validate(state))
                window.restart()
            elif run.train.save_every and progress.step % run.train.save_every == 0:
                began = time.perf_counter()
                save(state)
                window.started += time.perf_counter() - began
            if signals:
                if not due:
                    save(state)
                log.info(f"stopped at step {progress.step}; the same command with resume=auto goes on")
                raise SystemExit(128 + signals[0])
    if progress.judged != progress.step:
        judge(state, validate(state))
    best = progress.best[0]
    log.info(f"finished at step {progress.step}: best {run.train.monitor} {best[0]:.4g} at step {best[1]}")
    return best[0]


def horizon(config: TrainConfig, updates: int) -> int:
    """The number of the last update, whichever of max_steps and max_epochs comes first; every epoch has `updates`."""
    by_epochs = None if config.max_epochs is None else config.max_epochs * updates
    return min(end for end in (config.max_steps, by_epochs) if end is not None)


def finished(state: TrainState, last_step: int) -> bool:
    """Whether the last update is made, or patience is at its end."""
    config, progress = state.run.train, state.progress
    return progress.step >= last_step or config.patience is not None and progress.waiting >= config.patience


def train_step(state: TrainState, indices: Any, last_step: int) -> tuple[Loss, int, int]:
    """One update: the gradient of the mean loss over all target tokens of all micro-batches. Returns the sums of the
    loss, and the number of source and of target tokens."""
    run, model, progress = state.run, state.model, state.progress
    parts = micro_batches(indices, run.train.accumulate)
    batches = [assemble(state.train, part, seed_of(run.seed, progress.step, i)) for i, part in enumerate(parts)]
    tokens = sum(int(batch.target_length_B.sum()) for batch in batches)
    rate = learning_rate(run.optim, progress.step + 1, last_step, progress.decays)
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    scale = torch.tensor([tokens, (progress.step + 1) / last_step], dtype=wide(model.dtype))
    scale_2 = sent(scale, state.device)

    model.train()
    sums = []
    totals: list[Any] = [None for _ in model.parameters()]
    for i, batch in enumerate(batches):
        torch.manual_seed(seed_of(run.seed, progress.step, i))
        loss, found = state.differentiate(batch.to(state.device), scale_2)
        sums.append(loss)
        totals = [new if total is None else total.add_(new) for total, new in zip(totals, found, strict=True)]
    for parameter, total in zip(model.parameters(), totals, strict=True):
        parameter.grad = total
    if run.optim.clip is not None:
        clip(state.optimiser, model.parameters(), run.optim.clip)
    state.optimiser.step()
    state.optimiser.zero_grad(set_to_none=True)
    progress.step += 1
    source_tokens = sum(int(batch.source_length_B.sum()) for batch in batches)
    return Loss(*(sum(parts) for parts in zip(*sums, strict=True))), source_tokens, tokens


# -------------------------------------------------------------------------------------------------------- validation
def validate(state: TrainState) -> dict[str, Any]:
    """What `evaluate_loss` measures, and greedy BLEU against the raw references."""
    started = time.perf_counter()
    scores = evaluate_loss(state.model, state.tokenizer, state.valid, state.device)
    translator = Translator(state.model, state.tokenizer, SearchConfig(beam=1), state.device)
    found = translator.translate(list(column(state.valid, "source")))
    scores["bleu"] = bleu([options[0].text for options in found], list(column(state.valid, "target"))) or 0.0
    progress = state.progress
    attention = {"AER": scores["aer"], "attention entropy": scores["entropy"]}
    log.info(
        f"validation at step {progress.step}: loss {scores['loss']:.3f}, ppl {scores['ppl']:.2f}, "
        f"accuracy {scores['accuracy']:.1%}, BLEU {scores['bleu']:.2f}"
        + "".join(f", {name} {value:.3f}" for name, value in attention.items() if value is not None)
        + f" ({time.perf_counter() - started:.0f} s)"
    )
    record(state, {"event": "validate", "step": progress.step, "epoch": progress.epoch, **scores})
    return scores


def judge(state: TrainState, scores: dict[str, Any]) -> None:
    """Rank the present model, save it, and decide whether to go on and whether the learning rate falls."""
    config, progress = state.run.train, state.progress
    sign = 1 if HIGHER_IS_BETTER[config.monitor] else -1
    score = scores[config.monitor] if math.isfinite(scores[config.monitor]) else -sign * math.inf
    better = not progress.best or sign * score > sign * progress.best[0][0]
    progress.judged = progress.step
    progress.waiting = 0 if better else progress.waiting + 1
    progress.decays += not better and state.run.optim.schedule == "plateau"
    ranked = sorted([*progress.best, (score, progress.step)], key=lambda entry: (-sign * entry[0], entry[1]))
    progress.best = ranked[: config.keep]
    if config.patience is not None and progress.waiting >= config.patience:
        log.info(f"no better {config.monitor} in {progress.waiting} validations (train.patience): stopping")
    save(state)


def save(state: TrainState) -> None:
    """Write the last checkpoint, point `best` to the best one, and delete what need not be kept."""
    folder = save_checkpoint(state.folder, state.model, state.optimiser, dataclasses.asdict(state.progress))
    kept = [f"step_{step:06d}" for _, step in state.progress.best]
    if kept:
        write_atomically(state.folder / "checkpoints" / "best", [kept[0] + "\n"])
    delete_all_but(state.folder, {folder.name, *kept})


# ----------------------------------------------------------------------------------------------------------- reports
class Window:
    """Speed and loss since the last report."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.restart()

    def restart(self) -> None:
        """Begin anew, leaving out the time that went to something else than training."""
        self.sums: list[Loss] = []
        self.source = self.target = 0
        self.started = time.perf_counter()

    def add(self, sums: Loss, source: int, target: int) -> None:
        self.sums.append(sums)
        self.source, self.target = self.source + source, self.target + target

    def report(self, last_step: int, quiet: bool) -> str:
        """Write the window to metrics.jsonl and the log (a `quiet` one goes to the file alone: a bar shows it already).
        Returns a short form of it."""
        state, progress = self.state, self.state.progress
        nats = torch.stack([sums.nats for sums in self.sums]).sum().item() / self.target
        if not math.isfinite(nats):
            raise UserError(
                f"the loss is {nats} at step {progress.step}: training went astray; try a smaller optim.lr, a longer "
                "optim.warmup or optim.clip=1; the last checkpoint is from before"
            )
        correct = torch.stack([sums.correct for sums in self.sums]).sum().item() / self.target
        seconds = time.perf_counter() - self.started
        progress.seconds += seconds
        speed, target_speed = (self.source + self.target) / seconds, self.target / seconds
        rate = state.optimiser.param_groups[0]["lr"]
        epoch = progress.epoch + 1
        event = {
            **{"event": "train", "step": progress.step, "epoch": progress.epoch},
            **{"loss": nats, "ppl": math.exp(min(nats, 700)), "accuracy": correct, "lr": rate},
            **{"tokens_per_second": speed, "target_tokens_per_second": target_speed},
        }
        record(state, event)
        left = progress.seconds / progress.step * (last_step - progress.step)
        short = f"loss {nats:.3f}, {speed:,.0f} tokens/s ({target_speed:,.0f} target)"
        log.info(
            f"step {progress.step}/{last_step} epoch {epoch} {short}, lr {rate:.2g}, {left / 60:.1f} min left",
            extra={"quiet": quiet},
        )
        release_memory()
        self.restart()
        return short


def record(state: TrainState, event: dict[str, Any]) -> None:
    """Append one event to metrics.jsonl."""
    with open(state.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(finite(event)) + "\n")
    if state.board is not None:
        for key, value in finite(event).items():
            if isinstance(value, float):
                state.board.add_scalar(f"{event['event']}/{key}", value, event["step"])


# ------------------------------------------------------------------------------------------------------------ resume
def resume(state: TrainState) -> None:
    """Go back to the last checkpoint: weights, optimiser, place in the data; metrics.jsonl is cut back to its step.

    Raises:
        UserError: the checkpoint is damaged, or the training text is another one.
    """
    folder = last_checkpoint(state.folder)
    assert folder is not None
    verify(folder)
    load_weights(state.model, folder)
    restore(state.optimiser, load_tensors(folder / OPTIMISER))
    corpus = state.progress.corpus
    state.progress = Progress(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    if state.progress.corpus != corpus:
        raise UserError(
            f"the training or validation text of data.path={state.run.data.path} is not that of {state.folder}; give "
            f"the same text, or start anew with name=ANOTHER init_from={state.folder}"
        )
    state.progress.best = [(score, step) for score, step in state.progress.best]
    step = state.progress.step
    path = state.folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    whole = [line for line in lines if line.endswith("}\n")]  # the last one may be torn
    write_atomically(path, (line for line in whole if json.loads(line)["step"] <= step))
    log.info(f"resuming {state.folder} at step {step}")
