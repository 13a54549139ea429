"""The training loop: plain functions on one `TrainState`."""

import json
import math
import time
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from signal import Signals
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from nmt.config import MONITOR_FLOORS, MONITORS, SearchConfig, TrainConfig
from nmt.data.batching import Batches, epoch_batches, padding_waste
from nmt.data.corpus import column
from nmt.data.encoding import EncodedPairs, Indices
from nmt.data.subword_sampling import resample_subwords
from nmt.decoding.translator import Translator, warn_of_reach
from nmt.errors import UserError, with_filename
from nmt.evaluation.metrics import bleu, in_short
from nmt.model.out_of_memory import try_or_oom
from nmt.model.seq2seq import Seq2Seq
from nmt.runtime.device import contention_advice
from nmt.runtime.distributed import all_reduce_max, rank
from nmt.runtime.files import open_regular, write_atomically
from nmt.runtime.logging import log
from nmt.runtime.memory import peak_device_memory, release_memory
from nmt.runtime.signals import deferred_signals
from nmt.runtime.text_io import finite_or_none
from nmt.training.checkpoint import save_config
from nmt.training.state import TrainState, Validated, save
from nmt.training.step import UpdateResult, shapes_of, train_step
from nmt.training.validation import evaluate_loss


# -------------------------------------------------------------------------------------------------------------- loop
def fit(state: TrainState) -> float:
    """Train to the end that the settings give. Returns the best validation score.

    SIGINT and SIGTERM end it after a step, saved but not judged, or after the validation that they meet: resumed, it is
    as if nothing had happened.

    Raises:
        SystemExit: 128 + the signal's number.
        UserError: `train.max_skipped` updates in a row failed; there is no room for a checkpoint; or memory does not
            suffice for a single pair.
    """
    run, progress = state.run, state.progress
    batches = epoch_batches_of(state)
    total_steps = count_total_steps(state, batches)
    what = "an epoch" if state.stream is None else f"a window of {len(state.train):,} pairs"
    log.info(
        f"{len(batches)} updates in {what}, {total_steps} in all; padding {padding_waste(state.train, batches):.1%}"
    )
    if run.train.max_steps is not None and total_steps < run.train.max_steps:
        log.warning(
            f"train.max_epochs={run.train.max_epochs} ends training at step {total_steps}, before "
            f"train.max_steps={run.train.max_steps}; train.max_epochs=null leaves the end to the steps"
        )
    if state.model.reach is not None:
        warn_of_reach(state.model, state.train.source_lengths, "training pairs")
    if finished(state, total_steps) and progress.validated_step == progress.step:
        more = "train.max_epochs or train.max_steps" if progress.step >= total_steps else "train.patience"
        log.info(f"{state.folder} is finished already; a larger {more} goes on")
    elif progress.step and not rank():
        save_config(state.folder, run)  # it goes on, maybe with other settings
    with (
        deferred_signals() as signals,
        tqdm(total=total_steps, initial=progress.step, unit=" steps", disable=True if rank() else None) as bar,
    ):
        if progress.validated_step != progress.step and validation_due(state, len(batches), total_steps):
            update_best(state, validate(state))  # a signal came before it
        meter, saved = Meter(state), time.monotonic()
        while not finished(state, total_steps):
            if progress.position >= len(batches):
                meter.flush()  # of what failed the pairs are told, while they are here
                next_epoch(state)
                del batches  # of a large corpus two orders at a time are much memory
                batches = epoch_batches_of(state)
            meter.outcomes.append(train_step(state, batches[progress.position], total_steps))
            progress.position += 1
            bar.update()

            late = save_due(run.train, progress.step, time.monotonic() - saved)
            # One word for both: a signal may have come to any process, and their clocks differ.
            signal, saving = divmod(all_reduce_max(2 * max(signals, default=0) + late), 2)
            due = validation_due(state, len(batches), total_steps)
            if progress.step % run.train.log_every == 0 or due:
                bar.set_postfix_str(meter.report(total_steps, quiet=not bar.disable))
            if due and not signal:
                update_best(state, validate(state))
                meter.restart()
                signal = all_reduce_max(max(signals, default=0))  # one that came meanwhile
            elif signal or saving:
                began = time.perf_counter()
                meter.flush()
                save(state)
                meter.started += time.perf_counter() - began
            else:
                continue
            saved = time.monotonic()
            if signal:
                what = f"{Signals(signal).name}: stopped at step {progress.step}"
                log.info(f"{what}; the same command with resume=auto goes on")
                raise SystemExit(128 + signal)
    if progress.validated_step != progress.step:
        update_best(state, validate(state))
    best = progress.best[0]
    if progress.step >= total_steps:
        by_steps = total_steps == run.train.max_steps
        limit = f"max_steps={total_steps}" if by_steps else f"max_epochs={run.train.max_epochs}"
        log.info(f"train.{limit} is reached")
    log.info(f"finished at step {progress.step}: best {run.train.monitor} {best.score:.4g} at step {best.step}")
    return best.score


def epoch_batches_of(state: TrainState) -> Batches:
    """Those of the present epoch, or of the present window of a stream."""
    progress, number = state.progress, state.progress.window
    if state.stream is None:
        number, state.train = progress.epoch, epoch_corpus(state, progress.epoch)
    batches = epoch_batches(state.train, state.run.train, state.run.seed, number)
    if state.device.type == "cuda" and not len(state.shapes_K3):
        state.shapes_K3 = shapes_of(state, batches)
    return batches


def epoch_corpus(state: TrainState, epoch: int) -> EncodedPairs:
    """The corpus as an epoch has it: with `tokenizer.sampling` each has other pieces."""
    found = state.unsampled
    return resample_subwords(found, state.run.seed, epoch) if found.sampling else found


def next_epoch(state: TrainState) -> None:
    """Go to the next epoch, or to the next window of a stream."""
    progress = state.progress
    progress.position = 0
    if state.stream is None:
        progress.epoch += 1
    else:
        progress.window += 1
        load_window(state)


def load_window(state: TrainState) -> None:
    """Take the next window of a stream for the text that is trained on."""
    assert state.stream is not None
    state.train, state.progress.stream_offsets = next(state.stream)
    state.progress.epoch = state.progress.stream_offsets[0][0]


def count_total_steps(state: TrainState, present: Batches) -> int:
    """The number of the last update, whichever of max_steps and max_epochs comes first. Of epochs that are not of one
    length, all count as the first; `present` are the updates of the present one."""
    config, by_epochs = state.run.train, math.inf
    if config.max_epochs is not None and state.stream is None:
        if state.progress.epoch:
            present = epoch_batches(epoch_corpus(state, 0), config, state.run.seed, 0)
        by_epochs = config.max_epochs * len(present)
    return int(min(config.max_steps or math.inf, by_epochs))


def validation_due(state: TrainState, updates: int, total_steps: int) -> bool:
    """Whether to validate after this step, in an epoch of so many updates."""
    config, progress = state.run.train, state.progress
    if config.validate_every is None:
        due = progress.position == updates
    else:
        due = progress.step > 0 and progress.step % config.validate_every == 0
    return due or progress.step == total_steps


def save_due(config: TrainConfig, step: int, seconds: float) -> bool:
    """Whether to save after this step, so many seconds after the last checkpoint."""
    by_step = config.save_every is not None and step % config.save_every == 0
    return by_step or config.save_minutes is not None and seconds >= 60 * config.save_minutes


def finished(state: TrainState, total_steps: int) -> bool:
    """Whether the last update is made, or patience is at its end."""
    config, progress = state.run.train, state.progress
    return progress.step >= total_steps or config.patience is not None and progress.bad_validations >= config.patience


# -------------------------------------------------------------------------------------------------------- validation
def validate(state: TrainState) -> dict[str, Any]:
    """What `evaluate_loss` measures, and greedy BLEU against the raw references."""
    started = time.perf_counter()
    scores = evaluate_loss(state.model, state.tokenizer, state.valid, state.device)
    model = try_or_oom(partial(inference_copy, state)) or state.model
    translator = Translator(model, state.tokenizer, SearchConfig(beam=1).after(state.run.data), state.device)
    found = translator.translate(list(column(state.valid, "source")))
    texts, references = [options[0].text for options in found], list(column(state.valid, "target"))
    scores["bleu"] = bleu(texts, references, state.run.bleu_tokenizer) or 0.0
    progress = state.progress
    attention = {"AER": scores["aer"], "attention entropy": scores["entropy"]}
    log.info(
        f"validation at step {progress.step}: loss {scores['loss']:.3f}, ppl {in_short(scores['ppl'])}, "
        f"accuracy {scores['accuracy']:.1%}, BLEU {scores['bleu']:.2f}"
        + "".join(f", {name} {value:.3f}" for name, value in attention.items() if value is not None)
        + f" ({time.perf_counter() - started:.0f} s)"
    )
    write_event(state, {"event": "validate", "step": progress.step, "epoch": progress.epoch, **scores})
    return scores


def inference_copy(state: TrainState) -> Seq2Seq:
    """A copy of the present model as translation has it: its weights are cast and laid out once, not at each step."""
    model = deepcopy(state.model).eval().to(state.model.dtype)
    model.prepare_for_inference(int8=False)
    return model


def update_best(state: TrainState, scores: dict[str, Any]) -> None:
    """Rank the present model, save it, and decide whether to go on and whether the learning rate falls."""
    config, progress = state.run.train, state.progress
    sign = 1 if MONITORS[config.monitor] else -1
    score = scores[config.monitor] if math.isfinite(scores[config.monitor]) else -sign * math.inf
    floor = MONITOR_FLOORS.get(config.monitor, -math.inf)
    score = 0.0 if -math.inf < score < floor else score
    loss = scores["loss"] if math.isfinite(scores["loss"]) else math.inf
    found = Validated(score, loss, progress.step)

    def merit(one: Validated) -> tuple[float, float]:
        """Equal scores are ranked by loss."""
        return sign * one.score, -one.loss

    better = not progress.best or merit(found) > merit(progress.best[0])
    ranked = sorted([*progress.best, found], key=lambda one: (*merit(one), one.step), reverse=True)
    counts = not better and not ranked[0].score < floor  # until it has left its floor, a score says nothing
    progress.validated_step = progress.step
    progress.bad_validations = progress.bad_validations + 1 if counts else 0
    progress.decays += counts and state.run.optim.schedule == "plateau"
    progress.best = ranked[: config.keep]
    if config.patience is not None and progress.bad_validations >= config.patience:
        log.info(f"no better {config.monitor} in {progress.bad_validations} validations (train.patience): stopping")
    save(state)


# ----------------------------------------------------------------------------------------------------------- reports
class Meter:
    """Speed and loss since the last report, and how long the rest will take at the speed of this process so far."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.first = state.progress.step
        self.seconds = 0.0  # spent in training steps, since then
        self.fastest = 0.0  # tokens/s of a report, so far
        self.crowded = False  # whether that has been said
        self.restart()

    def restart(self) -> None:
        """Begin anew, leaving out the time that went to something else than training."""
        self.outcomes: list[UpdateResult] = []
        self.failed: list[bool] = []  # of each of these that was looked at
        self.started = time.perf_counter()

    def flush(self) -> None:
        """Count the updates that failed. A GPU has to be waited for to know it, so it is not done at each step.

        Raises:
            UserError: too many in a row.
        """
        progress, new = self.state.progress, self.outcomes[len(self.failed) :]
        for outcome in new:
            self.failed.append(bool(outcome.failed.item()))
            progress.skipped += self.failed[-1]
            progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if self.failed[-1] else 0
            if progress.skipped_in_a_row >= self.state.run.train.max_skipped:
                raise divergence_error(self.state, outcome)

    def report(self, total_steps: int, quiet: bool) -> str:
        """Write both to metrics.jsonl and the log (a `quiet` one goes to the file alone: a bar shows it already).
        Returns a short form of it.

        Raises:
            UserError: too many updates in a row failed.
        """
        self.flush()
        state, progress = self.state, self.state.progress
        seconds = time.perf_counter() - self.started
        self.seconds += seconds
        table = np.array(torch.stack([torch.stack(outcome.sums) for outcome in self.outcomes]).tolist())
        *_, source, target = table.sum(axis=0)
        _, nats, correct, _, learned = table[~np.array(self.failed)].sum(axis=0)
        nats, correct = (nats / learned, correct / learned) if learned else (math.nan, math.nan)
        speed, target_speed = (source + target) / seconds, target / seconds
        if not self.crowded and (remedy := contention_advice(state.device, speed, self.fastest)):
            self.crowded = True
            log.warning(remedy)
        self.fastest = max(self.fastest, speed)
        rate = state.optimizer.param_groups[0]["lr"]
        event = {
            **{"event": "train", "step": progress.step, "epoch": progress.epoch},
            **{"loss": nats, "ppl": math.exp(min(nats, 700)), "accuracy": correct, "lr": rate},
            **{"tokens_per_second": speed, "target_tokens_per_second": target_speed, "skipped": progress.skipped},
            "device_memory": peak_device_memory(state.device),
        }
        write_event(state, event)
        left = self.seconds / (progress.step - self.first) * (total_steps - progress.step)
        short = f"loss {nats:.3f}, {speed:,.0f} tokens/s ({target_speed:,.0f} target)"
        if any(self.failed):
            short += f", {sum(self.failed)} of {len(self.failed)} updates skipped (loss or gradient not finite)"
        log.info(
            f"step {progress.step}/{total_steps} epoch {progress.epoch + 1} {short}, lr {rate:.2g}, "
            f"{left / 60:.1f} min left",
            extra={"quiet": quiet},
        )
        release_memory()
        self.restart()
        return short


def divergence_error(state: TrainState, outcome: UpdateResult) -> UserError:
    """Write the pairs of an update that failed to a file, and say what can be done."""
    path = state.folder / "skipped.jsonl"
    if not rank():
        write_atomically(path, as_json(state.train, outcome.indices))
    return UserError(
        f"training diverged: {state.progress.skipped_in_a_row} updates in a row (train.max_skipped) were skipped "
        f"because loss or gradient was not finite, the last at step {outcome.step}: try a smaller optim.lr, a longer "
        f"optim.warmup or optim.clip=1. The pairs of that step are in {path}; the last checkpoint is as it was"
    )


def as_json(encoded: EncodedPairs, rows: Indices) -> Iterator[str]:
    """Pairs with their pieces, one a line."""
    table = encoded.pairs[rows]
    for number, row in enumerate(rows.tolist()):
        pair = {"pair": row + 1} | {name: values[number] for name, values in table.items()}
        pair["source_pieces"] = encoded.tokenizer.source.pieces(encoded.source[row].tolist())
        pair["target_pieces"] = encoded.tokenizer.target.pieces(encoded.target[row].tolist())
        yield json.dumps(pair, ensure_ascii=False) + "\n"


def write_event(state: TrainState, event: dict[str, Any]) -> None:
    """Append one event to metrics.jsonl."""
    if rank():
        return
    path = state.folder / "metrics.jsonl"
    with with_filename(path), open(path, "a", encoding="utf-8", opener=open_regular) as file:
        file.write(json.dumps(finite_or_none(event)) + "\n")
    if state.tensorboard is not None:
        for key, value in finite_or_none(event).items():
            if isinstance(value, float):
                state.tensorboard.add_scalar(f"{event['event']}/{key}", value, event["step"])
