"""The training loop: `fit` and the functions it calls, all on one `TrainState`."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from signal import Signals
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from nmt.config import MONITOR_FLOORS, MONITOR_METRICS, SearchConfig, TrainConfig
from nmt.data.batching import Batches, epoch_batches, padding_waste
from nmt.data.corpus import iter_column, take_rows
from nmt.data.encoding import EncodedPairs, Indices
from nmt.data.references import References, collect_references
from nmt.data.resampling import resample_pairs
from nmt.decoding.translation import Translation
from nmt.decoding.translator import Translator, warn_if_out_of_reach
from nmt.errors import UserError, with_filename
from nmt.evaluation.metrics import bleu, format_perplexity, sentence_chrf
from nmt.evaluation.report import build_pair
from nmt.model.out_of_memory import run_unless_out_of_memory
from nmt.model.seq2seq import Seq2Seq
from nmt.runs.checkpoint import save_config
from nmt.runs.history import METRICS_FILE, SAMPLES_FILE
from nmt.system.device import describe_contention
from nmt.system.distributed import all_reduce_max, rank
from nmt.system.files import write_atomically
from nmt.system.logging import log
from nmt.system.memory import peak_device_memory, release_memory
from nmt.system.signals import deferred_signals
from nmt.system.text_io import replace_nonfinite
from nmt.training.state import TrainState, ValidatedCheckpoint, save_state
from nmt.training.step import UpdateResult, choose_epoch_shapes, train_step
from nmt.training.validation import evaluate_loss

SAMPLES = 4  # validation pairs whose translations are written down at each validation


# --------------------------------------------------------------------------------------------------------------- loop
def fit(state: TrainState) -> float:
    """Train until `train.max_steps`, `train.max_epochs` or `train.patience` is reached, and return the best score.

    On SIGINT or SIGTERM, training stops after the current step, with a checkpoint but without validation, or after the
    validation in progress. Resuming continues exactly as if training had not been interrupted.

    Raises:
        SystemExit: 128 + the number of the signal.
        UserError: `train.max_skipped` updates in a row failed, the checkpoint cannot be written, or memory is too small
            for a single pair.
    """
    run, progress = state.run, state.progress
    batches = prepare_epoch(state)
    total_steps = count_total_steps(state, batches)
    log_plan(state, batches, total_steps)
    if progress.step and not rank() and not is_complete(state, total_steps, len(batches)):
        save_config(state.folder, run)  # the settings of a resumed run may have changed
    with (
        deferred_signals() as signals,
        # None shows the bar if standard error is a terminal.
        tqdm(total=total_steps, initial=progress.step, unit=" steps", disable=True if rank() else None) as bar,
    ):
        # A run that a signal stopped at a step with a validation due resumes with that validation.
        if progress.validated_step != progress.step and should_validate(state, len(batches), total_steps):
            record_validation(state, validate(state))
        meter, saved_at = ProgressMeter(state), time.monotonic()

        while not is_finished(state, total_steps, len(batches)):
            # Once all batches of the epoch are done, start the next one.
            if progress.position >= len(batches):
                meter.count_failures()  # while the pairs that a failure would report are still loaded
                start_next_epoch(state)
                del batches  # the batch orders of two epochs of a large corpus would take much memory
                batches = prepare_epoch(state)

            meter.add(train_step(state, batches[progress.position], total_steps))
            progress.position += 1
            bar.update()

            # Ranks agree on what to do next: any of them may have received a signal, and their clocks differ.
            # The signal and the flag travel in one number to save a message.
            wants_save = should_save(run.train, progress.step, time.monotonic() - saved_at)
            signal, is_save_due = divmod(all_reduce_max(2 * max(signals, default=0) + wants_save), 2)
            is_validation_due = should_validate(state, len(batches), total_steps)

            if progress.step % run.train.log_every == 0 or is_validation_due:
                bar.set_postfix_str(meter.report(total_steps, quiet=not bar.disable))

            if is_validation_due and not signal:
                record_validation(state, validate(state))
                meter.restart()
                signal = all_reduce_max(max(signals, default=0))  # one may have arrived during the validation
                saved_at = time.monotonic()
            elif is_save_due or signal:
                started = time.perf_counter()
                meter.count_failures()
                save_state(state)
                meter.exclude(time.perf_counter() - started)
                saved_at = time.monotonic()

            if signal:
                log.info(
                    f"{Signals(signal).name}: stopped at step {progress.step}; run the same command with resume=auto "
                    "to continue"
                )
                raise SystemExit(128 + signal)

    if progress.validated_step != progress.step:
        record_validation(state, validate(state))
    log_outcome(state, total_steps, len(batches))
    return progress.best[0].score


def log_plan(state: TrainState, batches: Batches, total_steps: int) -> None:
    """Log the length of training, and warn of settings that will not have the expected effect."""
    config = state.run.train
    unit = "epoch" if state.stream is None else f"window of {len(state.train_pairs):,} pairs"
    padding = padding_waste(state.train_pairs, batches)
    log.info(f"{len(batches)} updates per {unit}, {total_steps} in total; {padding:.1%} padding")
    if config.max_steps is not None and total_steps < config.max_steps:
        log.warning(
            f"train.max_epochs={config.max_epochs} ends training at step {total_steps}, before "
            f"train.max_steps={config.max_steps}; train.max_epochs=null removes the limit on epochs"
        )
    if state.model.reach is not None:
        warn_if_out_of_reach(state.model, state.train_pairs.source_lengths, "training pairs")
    if is_complete(state, total_steps, len(batches)):
        is_limit = is_at_limit(state, total_steps, len(batches))
        limit = "train.max_epochs or train.max_steps" if is_limit else "train.patience"
        log.info(f"{state.folder} is already finished; increase {limit} to continue training")


def log_outcome(state: TrainState, total_steps: int, epoch_updates: int) -> None:
    """Log which limit ended training, and the best score."""
    config, progress = state.run.train, state.progress
    if is_at_limit(state, total_steps, epoch_updates):
        is_step_limit = progress.step == config.max_steps
        limit = f"max_steps={config.max_steps}" if is_step_limit else f"max_epochs={config.max_epochs}"
        log.info(f"reached train.{limit}")
    best = progress.best[0]
    log.info(f"finished at step {progress.step}: best {config.monitor} {best.score:.4g} at step {best.step}")


# ----------------------------------------------------------------------------------------------------- data and limits
def prepare_epoch(state: TrainState) -> Batches:
    """Return the batches of the current epoch, or of the current window of a stream."""
    progress = state.progress
    number = progress.window
    if state.stream is None:
        number = progress.epoch
        state.train_pairs = get_epoch_pairs(state, number)
    batches = epoch_batches(state.train_pairs, state.run.train, state.run.seed, number)
    if state.device.type == "cuda" and not len(state.shapes_K3):
        state.shapes_K3 = choose_epoch_shapes(state, batches)
    return batches


def get_epoch_pairs(state: TrainState, epoch: int) -> EncodedPairs:
    """Return the training pairs of an epoch. With `tokenizer.sampling` or `augment.*` they differ in each."""
    pairs = state.original_pairs
    return resample_pairs(pairs, state.run.seed, epoch) if pairs.sampling or pairs.augmenter else pairs


def start_next_epoch(state: TrainState) -> None:
    """Go to the next epoch, or to the next window of a stream."""
    state.progress.position = 0
    if state.stream is None:
        state.progress.epoch += 1
    else:
        state.progress.window += 1
        load_next_window(state)


def load_next_window(state: TrainState) -> None:
    """Make the next window of a stream the training text."""
    assert state.stream is not None
    state.train_pairs, state.progress.stream_offsets = next(state.stream)
    state.progress.epoch = state.progress.stream_offsets[0][0]


def count_total_steps(state: TrainState, batches: Batches) -> int:
    """Return the number of the last update, by max_steps or max_epochs, whichever comes first.

    If epochs differ in length, all count like the first. `batches` are those of the current epoch.
    """
    config, epoch_limit = state.run.train, math.inf
    if config.max_epochs is not None and state.stream is None:
        if state.progress.epoch:
            batches = epoch_batches(get_epoch_pairs(state, 0), config, state.run.seed, 0)
        epoch_limit = config.max_epochs * len(batches)
    return int(min(config.max_steps or math.inf, epoch_limit))


def should_validate(state: TrainState, epoch_updates: int, total_steps: int) -> bool:
    """Whether to validate after this step, in an epoch of `epoch_updates` updates."""
    config, progress = state.run.train, state.progress
    if config.validate_every is None:
        is_due = progress.position == epoch_updates
    else:
        is_due = progress.step > 0 and progress.step % config.validate_every == 0
    return is_due or progress.step == total_steps


def should_save(config: TrainConfig, step: int, seconds: float) -> bool:
    """Whether to save after this step, `seconds` after the last checkpoint."""
    if config.save_every is not None and step % config.save_every == 0:
        return True
    return config.save_minutes is not None and seconds >= 60 * config.save_minutes


def is_at_limit(state: TrainState, total_steps: int, epoch_updates: int) -> bool:
    """Whether the last update is made. The last epoch may be over before, if epochs differ in length."""
    progress, max_epochs = state.progress, state.run.train.max_epochs
    is_last_epoch = state.stream is None and max_epochs is not None and progress.epoch + 1 >= max_epochs
    return progress.step >= total_steps or is_last_epoch and progress.position >= epoch_updates


def is_finished(state: TrainState, total_steps: int, epoch_updates: int) -> bool:
    """Whether the last update is made, or patience has run out."""
    config, progress = state.run.train, state.progress
    is_out_of_patience = config.patience is not None and progress.bad_validations >= config.patience
    return is_at_limit(state, total_steps, epoch_updates) or is_out_of_patience


def is_complete(state: TrainState, total_steps: int, epoch_updates: int) -> bool:
    """Whether training is finished and its last step validated."""
    return is_finished(state, total_steps, epoch_updates) and state.progress.validated_step == state.progress.step


# --------------------------------------------------------------------------------------------------------- validation
def validate(state: TrainState) -> dict[str, Any]:
    """Measure the scores of `evaluate_loss`, and BLEU of greedy translations against the raw references."""
    started = time.perf_counter()
    scores = evaluate_loss(state.model, state.tokenizer, state.valid, state.device)
    model = run_unless_out_of_memory(partial(copy_for_inference, state)) or state.model
    data = state.run.data
    search = SearchConfig(beam=1).with_source_limit_of(data)
    translator = Translator(model, state.tokenizer, search, state.device, data.languages)
    sources, references = list(iter_column(state.valid, "source")), collect_references(state.valid)
    samples = translator.translate(sources[:SAMPLES], keep_weights=True)
    translations = samples + translator.translate(sources[SAMPLES:], first_line=SAMPLES + 1)
    hypotheses = [options[0].text for options in translations]
    scores["bleu"] = bleu(hypotheses, references, state.run.bleu_tokenizer) or 0.0
    progress = state.progress
    write_event(
        state,
        {
            "event": "validate",
            "step": progress.step,
            "epoch": progress.epoch,
            "pairs": build_samples(sources, references, [options[0] for options in samples]),
        },
        SAMPLES_FILE,
    )
    attention = {"AER": scores["aer"], "attention entropy": scores["entropy"]}
    log.info(
        f"validation at step {progress.step}: loss {scores['loss']:.3f}, ppl {format_perplexity(scores['ppl'])}, "
        f"accuracy {scores['accuracy']:.1%}, BLEU {scores['bleu']:.2f}"
        + "".join(f", {name} {value:.3f}" for name, value in attention.items() if value is not None)
        + f" ({time.perf_counter() - started:.0f} s)"
    )
    write_event(state, {"event": "validate", "step": progress.step, "epoch": progress.epoch, **scores})
    return scores


def build_samples(
    sources: Sequence[str], references: References, translations: Sequence[Translation]
) -> list[dict[str, Any]]:
    """Return the first pairs with their translations and attention, in the format of the HTML report."""
    chrf = sentence_chrf([translation.text for translation in translations], references[: len(translations)])
    return [
        build_pair(row + 1, sources[row], references[row], translation, chrf[row])
        for row, translation in enumerate(translations)
    ]


def copy_for_inference(state: TrainState) -> Seq2Seq:
    """Copy the model for translation, so that weights are cast and laid out once instead of at each step."""
    model = deepcopy(state.model).eval().to(state.model.dtype)
    model.prepare_for_inference(int8=False)
    return model


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


# ------------------------------------------------------------------------------------------------------------ reports
class ProgressMeter:
    """Loss and speed since the last report, and the time left, estimated from the speed of this process."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.first_step = state.progress.step
        self.seconds = 0.0  # time of all reported training steps
        self.max_speed = 0.0  # tokens/s, the best report
        self.has_warned = False  # of contention, once per process
        self.restart()

    def restart(self) -> None:
        """Start a new reporting interval now."""
        self.results: list[UpdateResult] = []
        self.failed: list[bool] = []  # one per result, as far as `count_failures` has read them
        self.started = time.perf_counter()

    def add(self, result: UpdateResult) -> None:
        self.results.append(result)

    def exclude(self, seconds: float) -> None:
        """Leave time that was not spent on training out of the interval."""
        self.started += seconds

    def count_failures(self) -> None:
        """Count the updates that failed. This waits for the GPU, so it is not done at each step.

        Raises:
            UserError: too many failed in a row.
        """
        progress = self.state.progress
        for result in self.results[len(self.failed) :]:
            has_failed = bool(result.failed.item())
            self.failed.append(has_failed)
            progress.skipped += has_failed
            progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if has_failed else 0
            if progress.skipped_in_a_row >= self.state.run.train.max_skipped:
                raise make_divergence_error(self.state, result)

    def report(self, total_steps: int, quiet: bool) -> str:
        """Log loss and speed, append them to metrics.jsonl, start a new interval, and return a summary for the bar.

        With `quiet` the log line goes to the file only, because the bar already shows it.
        """
        self.count_failures()
        state, progress = self.state, self.state.progress
        seconds = time.perf_counter() - self.started
        self.seconds += seconds
        table = np.array(torch.stack([torch.stack(result.sums) for result in self.results]).tolist())
        *_, source_tokens, target_tokens = table.sum(axis=0)
        _, nats, correct, _, learned_tokens = table[~np.array(self.failed)].sum(axis=0)
        loss = accuracy = math.nan
        if learned_tokens:
            loss, accuracy = nats / learned_tokens, correct / learned_tokens
        speed, target_speed = (source_tokens + target_tokens) / seconds, target_tokens / seconds
        if not self.has_warned and (contention := describe_contention(state.device, speed, self.max_speed)):
            self.has_warned = True
            log.warning(contention)
        self.max_speed = max(self.max_speed, speed)
        learning_rate = state.optimizer.param_groups[0]["lr"]
        event = {
            "event": "train",
            "step": progress.step,
            "epoch": progress.epoch,
            "loss": loss,
            "ppl": math.exp(min(loss, 700)),
            "accuracy": accuracy,
            "lr": learning_rate,
            "tokens_per_second": speed,
            "target_tokens_per_second": target_speed,
            "skipped": progress.skipped,
            "device_memory": peak_device_memory(state.device),
        }
        write_event(state, event)
        seconds_left = self.seconds / (progress.step - self.first_step) * (total_steps - progress.step)
        summary = f"loss {loss:.3f}, {speed:,.0f} tokens/s ({target_speed:,.0f} target)"
        if any(self.failed):
            summary += f", {sum(self.failed)} of {len(self.failed)} updates skipped (loss or gradient not finite)"
        log.info(
            f"step {progress.step}/{total_steps} epoch {progress.epoch + 1} {summary}, lr {learning_rate:.2g}, "
            f"{seconds_left / 60:.1f} min left",
            extra={"quiet": quiet},
        )
        release_memory()
        self.restart()
        return summary


def make_divergence_error(state: TrainState, result: UpdateResult) -> UserError:
    """Write the pairs of a failed update to a file, and return the error to raise."""
    path = state.folder / "skipped.jsonl"
    if not rank():
        write_atomically(path, pairs_to_json(state.train_pairs, result.indices))
    return UserError(
        f"training diverged: the loss or gradient was not finite in {state.progress.skipped_in_a_row} updates in a row "
        f"(train.max_skipped), last at step {result.step}. Try a lower optim.lr, a longer optim.warmup, or an "
        f"optim.clip below 1. The pairs of that step are in {path}; the last checkpoint is unchanged"
    )


def pairs_to_json(encoded: EncodedPairs, rows: Indices) -> Iterator[str]:
    """Yield each pair and its pieces as a line of JSON."""
    columns = take_rows(encoded.pairs, rows).to_pydict()
    for number, row in enumerate(rows.tolist()):
        pair = {"pair": row + 1} | {name: values[number] for name, values in columns.items()}
        pair["source_pieces"] = encoded.tokenizer.source.pieces(encoded.source[row].tolist())
        pair["target_pieces"] = encoded.tokenizer.target.pieces(encoded.target[row].tolist())
        yield json.dumps(pair, ensure_ascii=False) + "\n"


def write_event(state: TrainState, event: dict[str, Any], name: str = METRICS_FILE) -> None:
    """Append an event to a file of the run, and its numbers to TensorBoard if it is installed."""
    if rank():
        return
    event = replace_nonfinite(event)
    path = state.folder / name
    with with_filename(path), open(path, "a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(event) + "\n")
    if state.tensorboard is not None:
        for key, value in event.items():
            if isinstance(value, float):
                state.tensorboard.add_scalar(f"{event['event']}/{key}", value, event["step"])
