"""The training loop: evaluate, save, step, log."""

import math
import time
from signal import Signals
from typing import Any

from tqdm import tqdm

from nmt.config import MONITOR_FLOORS, MONITOR_METRICS
from nmt.data.batching import padding_waste
from nmt.decoding.translator import warn_of_long_sources
from nmt.runs.history import METRICS_FILE
from nmt.system.distributed import all_reduce_max, rank
from nmt.system.logging import log
from nmt.system.memory import peak_device_memory, release_memory
from nmt.system.signals import deferred_signals
from nmt.training.meter import ProgressMeter, write_event
from nmt.training.progress import ValidatedCheckpoint
from nmt.training.state import TrainState, save_state
from nmt.training.step import train_step
from nmt.training.validation import validate


def fit(state: TrainState) -> float:
    """Train until `train.max_steps`, `train.max_epochs` or `train.patience` is reached, and return the best score.

    On SIGINT or SIGTERM, training stops after the current step, with a checkpoint but without validation, or after the
    validation in progress. Resuming continues exactly as if training had not been interrupted.

    Raises:
        SystemExit: 128 + the number of the signal.
        UserError: too many updates in a row failed, the checkpoint cannot be written, or memory is too small
            for a single pair.
    """
    config, data, progress = state.run.train, state.data, state.progress
    total_steps = data.count_total_steps(progress.epoch)
    log_plan(state, total_steps)
    meter, saved_step, saved_at = ProgressMeter(), progress.step, time.monotonic()
    with (
        deferred_signals() as signals,
        # None shows the bar if standard error is a terminal.
        tqdm(total=total_steps, initial=progress.step, unit=" steps", disable=True if rank() else None) as bar,
    ):
        while True:
            # Ranks agree on what to do next: any of them may have received a signal, and their clocks differ.
            # The signal and the flag travel in one number to save a message.
            is_due_here = config.save_minutes is not None and time.monotonic() - saved_at >= 60 * config.save_minutes
            signal, is_due = divmod(all_reduce_max(2 * max(signals, default=0) + is_due_here), 2)

            # Evaluate. A run that a signal stopped where a validation was due resumes with that validation.
            if is_validation_due(state, total_steps) and not signal:
                with meter.paused():
                    record_validation(state, validate(state))
                saved_step, saved_at = progress.step, time.monotonic()
                signal = all_reduce_max(max(signals, default=0))  # one may have arrived during the validation

            # Save.
            if progress.step != saved_step and (is_due or signal):
                meter.count_failures(progress)
                with meter.paused():
                    save_state(state)
                saved_step, saved_at = progress.step, time.monotonic()

            if signal:
                log.info(
                    f"{Signals(signal).name}: stopped at step {progress.step}; run the same command with resume=auto "
                    "to continue"
                )
                raise SystemExit(128 + signal)
            if is_finished(state, total_steps):
                break

            # Step.
            if progress.position == len(data.batches):
                data.load_next(progress)
            meter.add(train_step(state, data.batches[progress.position], total_steps))
            progress.position += 1
            bar.update()

            # Log.
            if progress.step % config.log_every == 0 or is_validation_due(state, total_steps):
                bar.set_postfix_str(report(state, meter, total_steps, quiet=not bar.disable))
                release_memory()

    best = progress.best[0]
    log.info(f"finished at step {progress.step}: best {config.monitor} {best.score:.4g} at step {best.step}")
    return best.score


# -------------------------------------------------------------------------------------------------- what is due when
def log_plan(state: TrainState, total_steps: int) -> None:
    """Log the length of training, and warn of settings that will not have the expected effect."""
    config, data = state.run.train, state.data
    unit = "epoch" if data.stream is None else f"window of {len(data.pairs):,} pairs"
    padding = padding_waste(data.pairs, data.batches)
    log.info(f"{len(data.batches)} updates per {unit}, {total_steps} in total; {padding:.1%} padding")
    if config.max_steps is not None and total_steps < config.max_steps:
        log.warning(
            f"train.max_epochs={config.max_epochs} ends training at step {total_steps}, before "
            f"train.max_steps={config.max_steps}; train.max_epochs=null removes the limit on epochs"
        )
    if state.model.max_source_positions is not None:
        warn_of_long_sources(state.model, data.pairs.source_lengths, "training pairs")
    if is_finished(state, total_steps) and not is_validation_due(state, total_steps):
        limit = "train.max_epochs or train.max_steps" if is_at_limit(state, total_steps) else "train.patience"
        log.info(f"{state.folder} is already finished; increase {limit} to continue training")


def is_validation_due(state: TrainState, total_steps: int) -> bool:
    """Whether to validate after this step."""
    config, progress = state.run.train, state.progress
    if config.validate_every is None:
        is_due = progress.position == len(state.data.batches)
    else:
        is_due = progress.step > 0 and progress.step % config.validate_every == 0
    return (is_due or is_at_limit(state, total_steps)) and progress.validated_step != progress.step


def is_at_limit(state: TrainState, total_steps: int) -> bool:
    """Whether the last update is made. The last epoch may be over before, if epochs differ in length."""
    progress, max_epochs = state.progress, state.run.train.max_epochs
    is_last_epoch = state.data.stream is None and max_epochs is not None and progress.epoch + 1 >= max_epochs
    return progress.step >= total_steps or is_last_epoch and progress.position == len(state.data.batches)


def is_finished(state: TrainState, total_steps: int) -> bool:
    """Whether the last update is made, or patience has run out."""
    patience = state.run.train.patience
    is_out_of_patience = patience is not None and state.progress.bad_validations >= patience
    return is_at_limit(state, total_steps) or is_out_of_patience


# ------------------------------------------------------------------------------------------------------------- evaluate
def record_validation(state: TrainState, scores: dict[str, Any]) -> None:
    """Rank the validated model, update patience and plateau decay, and save a checkpoint."""
    config, progress = state.run.train, state.progress
    sign = 1 if MONITOR_METRICS[config.monitor] else -1
    score = scores[config.monitor] if math.isfinite(scores[config.monitor]) else -sign * math.inf
    floor = MONITOR_FLOORS.get(config.monitor, -math.inf)
    score = 0.0 if -math.inf < score < floor else score
    loss = scores["loss"] if math.isfinite(scores["loss"]) else math.inf
    current = ValidatedCheckpoint(score, loss, progress.step)

    def merit(entry: ValidatedCheckpoint) -> tuple[float, float]:
        """Equal scores are ranked by loss."""
        return sign * entry.score, -entry.loss

    is_better = not progress.best or merit(current) > merit(progress.best[0])
    ranked = sorted([*progress.best, current], key=lambda entry: (*merit(entry), entry.step), reverse=True)
    is_bad = not is_better and not ranked[0].score < floor  # scores below the floor cannot be compared
    progress.validated_step = progress.step
    progress.bad_validations = progress.bad_validations + 1 if is_bad else 0
    if is_bad and state.run.optim.schedule == "plateau":
        progress.decays += 1
    progress.best = ranked[: config.keep]
    if config.patience is not None and progress.bad_validations >= config.patience:
        log.info(f"no better {config.monitor} in {progress.bad_validations} validations (train.patience): stopping")
    save_state(state)


# ------------------------------------------------------------------------------------------------------------------ log
def report(state: TrainState, meter: ProgressMeter, total_steps: int, quiet: bool) -> str:
    """Log loss and speed, append them to metrics.jsonl, and return a summary for the bar.

    With `quiet` the log line goes to the file only, because the bar already shows it.
    """
    progress = state.progress
    meter.count_failures(progress)
    updates, failed, measures = len(meter.failed), sum(meter.failed), meter.measure()
    learning_rate = state.optimizer.param_groups[0]["lr"]
    event = {"event": "train", "step": progress.step, "epoch": progress.epoch, **measures, "lr": learning_rate}
    event |= {"skipped": progress.skipped, "device_memory": peak_device_memory(state.device)}
    write_event(state.folder / METRICS_FILE, event)
    speed, target_speed = measures["tokens_per_second"], measures["target_tokens_per_second"]
    summary = f"loss {measures['loss']:.3f}, {speed:,.0f} tokens/s ({target_speed:,.0f} target)"
    if failed:
        summary += f", {failed} of {updates} updates skipped (loss or gradient not finite)"
    seconds_left = meter.seconds / meter.steps * (total_steps - progress.step)
    log.info(
        f"step {progress.step}/{total_steps} epoch {progress.epoch + 1} {summary}, lr {learning_rate:.2g}, "
        f"{seconds_left / 60:.1f} min left",
        extra={"quiet": quiet},
    )
    return summary
