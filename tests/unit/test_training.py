"""Training loop, validation, checkpoints and run folders on a small corpus."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sacrebleu
import torch
from builders import CPU, list_checkpoints, make_state, read_events, write_corpus
from torch.nn import functional as F

from nmt.config import PAD, SearchConfig, TrainRun
from nmt.data.batch import Batch, make_batch
from nmt.data.batching import collate, epoch_batches
from nmt.data.corpus import iter_column
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.model.kernels.linear import Dropout
from nmt.model.seq2seq import Seq2Seq
from nmt.runs.checkpoint import find_checkpoint, save_config
from nmt.runs.folder import lock_run_folder
from nmt.training import step as training_step
from nmt.training.loop import fit, is_finished, record_validation
from nmt.training.start import check_run_folder
from nmt.training.state import TrainState
from nmt.training.step import train_step
from nmt.training.validation import evaluate_loss, validate


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), train=120, valid=4, test=2)


def disable_dropout(state: TrainState) -> TrainState:
    for module in state.model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    return state


def forced_logits(model: Seq2Seq, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits_RV of the target pieces of a batch, `</s>` included, and the pieces."""
    memory, state = model.start(batch.source_BS, batch.source_length_B)
    features_BTD, *_ = model.decode(batch.target_BT[:, :-1], state, memory)
    target_BT = batch.target_BT[:, 1:]
    return model.logits(features_BTD)[target_BT != PAD], target_BT[target_BT != PAD]


# Score and loss, then the best two steps, bad validations and decays after the validation.
RANKED = [
    (math.nan, math.nan, [1], 0, 0),
    (0.0, 5.2, [2, 1], 0, 0),
    (0.0, 4.0, [3, 2], 0, 0),  # equal scores are ranked by loss
    (0.0, 4.5, [3, 4], 0, 0),  # worse, but not counted as bad while the score is still 0
    (0.0004, 3.0, [5, 3], 0, 0),  # rounds to 0.00
    (0.0001, 2.9, [6, 5], 0, 0),
    (math.nan, math.nan, [6, 5], 0, 0),
    (0.5, 3.5, [8, 6], 0, 0),
    (0.5, 3.6, [8, 9], 1, 1),
    (0.5, 3.4, [10, 8], 0, 1),
    (math.nan, 1.0, [10, 8], 1, 2),
    (0.5, 3.4, [12, 10], 2, 3),  # a tie is no improvement, but the later checkpoint wins
]


@pytest.mark.parametrize("monitor", ["bleu", "accuracy"])
def test_checkpoints_are_ranked_by_score_and_then_by_loss(monitor: str, corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path, {"schedule": "plateau"}, monitor=monitor, keep=2, patience=2)
    progress = state.progress
    for step, (score, loss, best, bad_validations, decays) in enumerate(RANKED, 1):
        progress.step = step
        record_validation(state, {monitor: score, "loss": loss})
        assert [entry.step for entry in progress.best] == best
        assert (progress.validated_step, progress.bad_validations, progress.decays) == (step, bad_validations, decays)
        assert is_finished(state, 100) == (bad_validations == 2)
        assert find_checkpoint(str(tmp_path))[1].name == f"step_{best[0]:06d}"


@pytest.mark.parametrize("monitor", ["loss", "ppl"])
def test_lower_losses_are_better(monitor: str, corpus: Path, tmp_path: Path) -> None:
    """Without the schedule, a worse validation lowers no learning rate."""
    state = make_state(corpus, tmp_path, monitor=monitor, keep=2)
    for step, score in enumerate((3.0, 2.0, math.nan, 2.5), 1):
        state.progress.step = step
        record_validation(state, {"loss": 5.0} | {monitor: score})
    assert [entry.step for entry in state.progress.best] == [2, 4]
    assert (state.progress.bad_validations, state.progress.decays) == (2, 0)


def test_validation_bleu_compares_greedy_translations_with_targets(corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path)
    sources, targets = (list(iter_column(state.data.valid, name)) for name in ("source", "target"))
    state.model.eval()

    def translate(beam: int) -> list[str]:
        translator = Translator(state.model, state.data.corpus.tokenizer, SearchConfig(beam=beam), CPU)
        return [hypotheses[0].text for hypotheses in translator.translate(sources)]

    greedy, beam_5 = translate(1), translate(5)
    targets[::2] = greedy[::2]
    state.data.valid = pa.table({"source": sources, "target": targets})
    greedy_bleu, beam_5_bleu = (sacrebleu.corpus_bleu(texts, [targets]).score for texts in (greedy, beam_5))
    assert 99 > greedy_bleu > beam_5_bleu + 20
    scores = validate(state)
    assert scores["bleu"] == pytest.approx(greedy_bleu) == read_events(tmp_path, "validate")[0]["bleu"]


def test_best_and_last_two_checkpoints_are_kept(corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path, {"lr": 0.01}, max_steps=16, validate_every=2, monitor="loss", keep=3)
    best = fit(state)
    losses = {int(event["step"]): event["loss"] for event in read_events(tmp_path, "validate")}
    ranked = sorted(losses, key=lambda step: losses[step])[:3]
    assert [entry.step for entry in state.progress.best] == ranked and best == losses[ranked[0]]
    assert list_checkpoints(tmp_path) == {f"step_{step:06d}" for step in (*ranked, 14, 16)}
    assert find_checkpoint(str(tmp_path))[1].name == f"step_{ranked[0]:06d}"


def test_plateau_schedule_lowers_learning_rate(corpus: Path, tmp_path: Path) -> None:
    optim = {"name": "sgd", "lr": 1e-9, "schedule": "plateau"}
    fit(make_state(corpus, tmp_path, optim, max_steps=8, validate_every=2, monitor="loss"))
    rates = [event["lr"] for event in read_events(tmp_path, "train")]
    validations = read_events(tmp_path, "validate")
    decays, best, expected = 0, math.inf, []
    for event in validations:
        expected.append(1e-9 * 0.5**decays)
        decays, best = decays + (event["loss"] >= best), min(best, event["loss"])
    assert rates == pytest.approx(expected) and rates[-1] < rates[0]


def record_training(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[int]]:
    """Train, and return the pairs of each update and PyTorch's seed at each micro-batch."""
    backward, rows, seeds = training_step.backward, [], []

    def recording_step(state: TrainState, indices: Any, total_steps: int) -> Any:
        rows.append(indices.tolist())
        return train_step(state, indices, total_steps)

    def recording_backward(*args: Any) -> Any:
        seeds.append(torch.initial_seed())
        return backward(*args)

    monkeypatch.setattr("nmt.training.loop.train_step", recording_step)
    monkeypatch.setattr("nmt.training.loop.validate", lambda *_: {"bleu": 0.0, "loss": 1.0})
    monkeypatch.setattr(training_step, "backward", recording_backward)
    fit(state)
    monkeypatch.setattr(training_step, "backward", backward)
    return rows, seeds


def test_order_and_random_seeds_differ_by_epoch_and_seed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs, all_seeds = [], []
    for seed, count in ((1, 2), (2, 1)):
        state = make_state(corpus, tmp_path / str(seed), max_epochs=count, batch_tokens=1000)
        state.run.seed = seed
        state.data.load(state.progress)
        rows, seeds = record_training(state, monkeypatch)
        size = len(rows) // count
        epochs += [rows[size * epoch : size * (epoch + 1)] for epoch in range(count)]
        all_seeds += seeds
    assert len(all_seeds) == len(set(all_seeds)) == sum(map(len, epochs))
    sizes = [[len(rows) for rows in epoch] for epoch in epochs]
    assert sizes[0] != sizes[1] and sizes[0] != sizes[2] and sorted(sizes[0]) == sorted(sizes[1]) == sorted(sizes[2])
    for epoch in epochs:
        assert sorted(row for rows in epoch for row in rows) == [*range(120)]


def test_ranks_use_different_random_seeds(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr("nmt.training.step.world_size", lambda: 3)
    for number in range(3):
        monkeypatch.setattr("nmt.training.step.rank", lambda number=number: number)
        state = make_state(corpus, tmp_path / str(number), max_steps=2, accumulate=2)
        seeds += record_training(state, monkeypatch)[1]
    assert len(set(seeds)) == len(seeds) == 3 * 2 * 2


def test_no_epoch_beyond_the_last(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three epochs has more updates than the others, so that three like it would reach into a fourth."""
    validated: list[int] = []
    monkeypatch.setattr(
        "nmt.training.loop.validate",
        lambda state: validated.append(state.progress.step) or {"bleu": 0.0, "loss": 1.0},
    )
    whole_epoch = epoch_batches
    monkeypatch.setattr(
        "nmt.training.data.epoch_batches", lambda *given: [*whole_epoch(*given)][: 3 if given[-1] == 0 else 2]
    )
    state = make_state(corpus, tmp_path, max_epochs=3)
    fit(state)
    assert (state.progress.step, state.progress.epoch, state.progress.position) == (7, 2, 2)
    assert validated == [3, 5, 7]


def test_total_steps_do_not_depend_on_resumed_epoch(corpus: Path, tmp_path: Path) -> None:
    """Use subword sampling, so that each epoch has different pieces."""
    results = []
    for epoch in (0, 2):
        state = make_state(corpus, tmp_path, max_epochs=3)
        state.data.corpus = replace(state.data.corpus, sampling=0.5)
        state.progress.epoch = epoch
        state.data.load(state.progress)
        results.append((state.data.count_total_steps(epoch), state.data.pairs.source.ids.tolist()))
    (steps_0, ids_0), (steps_2, ids_2) = results
    assert steps_0 == steps_2 and ids_0 != ids_2


def test_repeated_non_finite_updates_stop_training(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.training.meter.MAX_SKIPPED", 3)
    state = make_state(corpus, tmp_path, max_steps=8)
    with torch.no_grad():
        state.model.output.bias[5] = math.nan
    before = state.model.target_embedding.weight.detach().clone()
    with pytest.raises(UserError, match="3 updates in a row, last at step 3. Try a lower optim.lr"):
        fit(state)
    assert torch.equal(state.model.target_embedding.weight, before)
    assert not (tmp_path / "checkpoints").exists()


def test_non_finite_update_is_skipped_and_counted(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nmt")
    state = make_state(corpus, tmp_path, max_steps=8, log_every=4)
    backward, biases = training_step.backward, []

    def failing_backward(*args: Any) -> Any:
        loss, gradients = backward(*args)
        if state.progress.step in (2, 6):
            gradients[0] = gradients[0] * math.inf
        if state.progress.step in (2, 3, 6, 7):
            biases.append(state.model.output.bias.detach().clone())
        return loss, gradients

    monkeypatch.setattr(training_step, "backward", failing_backward)
    fit(state)
    assert torch.equal(biases[0], biases[1]) and torch.equal(biases[2], biases[3])
    assert not torch.equal(biases[0], biases[2])
    events = read_events(tmp_path, "train")
    assert [event["skipped"] for event in events] == [1, 2] and all(math.isfinite(event["loss"]) for event in events)
    assert caplog.text.count("1 of 4 updates skipped") == 2
    assert state.progress.skipped == 2 and state.progress.skipped_in_a_row == 0


def test_batch_too_large_for_memory_is_split(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the update does not change, and that the error about a too large single pair names remedies."""

    def run_out_of_memory(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    results, backward = [], training_step.backward
    for max_pairs in (20, 7, 0):
        state = make_state(corpus, tmp_path / str(max_pairs), {"name": "sgd", "lr": 1.0}, max_steps=1)
        disable_dropout(state)

        def limited_backward(
            run: TrainRun, model: Seq2Seq, batch: Batch, *args: Any, max_pairs: int = max_pairs
        ) -> Any:
            if len(batch.source_BS) <= max_pairs:
                return backward(run, model, batch, *args)
            handle = model.output.bias.register_post_accumulate_grad_hook(run_out_of_memory)  # other gradients exist
            try:
                return backward(run, model, batch, *args)
            finally:
                handle.remove()

        monkeypatch.setattr(training_step, "backward", limited_backward)
        if not max_pairs:
            with pytest.raises(UserError, match="single pair of up to .* lower data.max_length=.*hidden=[0-9]+$"):
                train_step(state, np.arange(20), 1)
            state.run.train.r_drop = 4
            with pytest.raises(UserError, match="single pair of up to .*hidden=[0-9]+, or set train.r_drop=0"):
                train_step(state, np.arange(20), 1)
            break
        outcome = train_step(state, np.arange(20), 1)
        results.append((outcome.sums.target, outcome.sums.nats, state.model.state_dict()))
        log_before = caplog.text
        train_step(state, np.arange(20), 2)
        assert caplog.text == log_before  # the smaller batch size is remembered
    torch.testing.assert_close(*results)
    assert "out of memory for 20 pairs of up to" in caplog.text and "train.accumulate=4" in caplog.text


def test_run_folder_is_locked_and_must_contain_a_run(corpus: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    with lock_run_folder(new), pytest.raises(UserError, match="another process"), lock_run_folder(new):
        pass
    assert not new.exists()
    (tmp_path / "tokenizer.model").write_bytes(b"mine")
    for _ in range(2):
        with lock_run_folder(tmp_path):
            pass
    with pytest.raises(UserError, match="contains tokenizer.model but is not a run"):
        check_run_folder(tmp_path, TrainRun())
    save_config(tmp_path, TrainRun())
    assert not check_run_folder(tmp_path, TrainRun(resume="auto"))
    with pytest.raises(UserError, match="resume=true, but .* has no checkpoint"):
        check_run_folder(tmp_path, TrainRun(resume="true"))
    fit(make_state(corpus, tmp_path, max_steps=2))
    with pytest.raises(UserError, match="already contains a trained model"):
        check_run_folder(tmp_path, TrainRun())
    assert check_run_folder(tmp_path, TrainRun(resume="auto"))


def test_validation_skips_very_long_lines_and_splits_large_batches(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that neither changes the scores."""
    state = make_state(corpus, tmp_path, max_steps=1)
    scores = evaluate_loss(state.model, state.data.corpus.tokenizer, state.data.valid, CPU)
    long_pairs = {"source": ["Hund " * 20_000, "Ein Hund"], "target": ["A dog", "dog " * 5_000]}
    with_long_pairs = pa.concat_tables([state.data.valid.select([*long_pairs]), pa.table(long_pairs)])
    assert evaluate_loss(state.model, state.data.corpus.tokenizer, with_long_pairs, CPU) == scores
    assert "2 pairs of more than 1,000 pieces (first: 5, 6)" in caplog.text
    loss = state.model.loss

    def limited_loss(source_BS: torch.Tensor, *args: Any) -> Any:
        if len(source_BS) > 2:
            raise MemoryError
        return loss(source_BS, *args)

    monkeypatch.setattr(state.model, "loss", limited_loss)
    split_scores = evaluate_loss(state.model, state.data.corpus.tokenizer, state.data.valid, CPU)
    assert split_scores.pop("aer") is scores.pop("aer") is None and split_scores == pytest.approx(scores, rel=1e-5)


def test_validation_scores_match_forced_decoding(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check loss, perplexity and accuracy per target piece, `</s>` included, with batches of 3."""
    state = make_state(corpus, tmp_path, {"lr": 0.1})
    for rows in state.data.batches[:10]:
        train_step(state, rows, 10)
    model, tokenizer = state.model.eval(), state.data.corpus.tokenizer
    columns = (list(iter_column(state.data.valid, name)) for name in ("source", "target"))
    source_ids, target_ids = (
        side.encode(lines) for side, lines in zip((tokenizer.source, tokenizer.target), columns, strict=True)
    )
    with torch.inference_mode():
        logits, targets = zip(
            *(forced_logits(model, make_batch([s], [t])) for s, t in zip(source_ids, target_ids, strict=True)),
            strict=True,
        )
    logits_RV, target_R = torch.cat(logits), torch.cat(targets)
    loss, correct = F.cross_entropy(logits_RV, target_R).item(), logits_RV.argmax(1) == target_R
    assert correct.double().mean() > 0.05
    monkeypatch.setattr("nmt.decoding.batches.choose_batch_size", lambda *args: 3)
    scores = evaluate_loss(model, tokenizer, state.data.valid, CPU)
    assert (scores["loss"], scores["ppl"]) == pytest.approx((loss, math.exp(loss)), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(correct.double().mean().item())


def test_train_event_covers_all_target_tokens_since_last_event(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the reported loss is the unsmoothed cross-entropy in nats."""
    optim = {"name": "sgd", "lr": 1e-12}
    state = disable_dropout(make_state(corpus, tmp_path, optim, max_steps=5, log_every=3, accumulate=2))
    with torch.no_grad():
        counts = np.bincount(state.data.pairs.target.ids, minlength=state.data.corpus.tokenizer.target.vocab_size)
        state.model.output.bias += torch.from_numpy(counts).log1p()
        batches = [collate(state.data.pairs, rows) for rows in state.data.batches[:3]]
        logits, targets = zip(*(forced_logits(state.model, batch) for batch in batches), strict=True)
    logits_RV, target_R = torch.cat(logits), torch.cat(targets)
    loss = F.cross_entropy(logits_RV, target_R).item()
    accuracy = (logits_RV.argmax(1) == target_R).double().mean().item()
    num_source = sum(int((batch.source_BS != PAD).sum()) for batch in batches)
    assert num_source != len(target_R) and accuracy > 0.02
    monkeypatch.setattr("nmt.training.loop.validate", lambda *_: {"bleu": 0.0, "loss": 1.0})
    fit(state)
    event = read_events(tmp_path, "train")[0]
    assert event["step"] == 3 and event["accuracy"] == pytest.approx(accuracy)
    assert (event["loss"], event["ppl"]) == pytest.approx((loss, math.exp(loss)), rel=1e-4)
    assert event["device_memory"] is None  # reported on GPUs only
    target_fraction = event["target_tokens_per_second"] / event["tokens_per_second"]
    assert target_fraction == pytest.approx(len(target_R) / (num_source + len(target_R)))
