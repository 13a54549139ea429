"""The loop and its checkpoints on a small corpus: when it stops, what it keeps, how it goes on."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from builders import CPU, list_checkpoints, make_state, read_events, write_corpus
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file
from torch.nn import functional as F

from nmt.config import (
    PAD,
    SearchConfig,
    TrainConfig,
    TrainRun,
)
from nmt.data.batching import Batch, collate, epoch_batches, make_batch
from nmt.data.corpus import iter_column
from nmt.decoding.translator import Translator
from nmt.errors import UserError
from nmt.model.kernels.linear import Dropout
from nmt.model.seq2seq import Seq2Seq
from nmt.training import step as training_step
from nmt.training.checkpoint import (
    find_checkpoint,
    find_last_checkpoint,
    find_last_intact_checkpoint,
    save_checkpoint,
    save_config,
    verify_checkpoint,
)
from nmt.training.loop import count_total_steps, fit, is_finished, prepare_epoch, record_validation, validate
from nmt.training.run_dir import (
    check_resumed_settings,
    check_run_folder,
    find_starting_point,
    lock_run_folder,
    open_run_folder,
)
from nmt.training.state import Progress, TrainState, save_state
from nmt.training.step import train_step
from nmt.training.validation import evaluate_loss


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), train=120, valid=12, test=2)


def without_dropout(state: TrainState) -> TrainState:
    for module in state.model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    return state


def forced(model: Seq2Seq, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """logits_RV of the target pieces of a batch, `</s>` included, and the pieces."""
    memory, state = model.start(batch.source_BS, batch.source_length_B)
    features_BTD, *_ = model.decode(batch.target_BT[:, :-1], state, memory)
    wanted_BT = batch.target_BT[:, 1:]
    return model.logits(features_BTD)[wanted_BT != PAD], wanted_BT[wanted_BT != PAD]


def test_patience_stops_a_run_that_learns_nothing(corpus: Path, tmp_path: Path) -> None:
    standing = {"name": "sgd", "lr": 1e-12}
    state = make_state(corpus, tmp_path, standing, max_steps=30, validate_every=3, monitor="loss", patience=2)
    fit(state)
    assert [event["step"] for event in read_events(tmp_path, "validate")] == [3, 6, 9]
    assert state.progress.best[0].step == 9 and list_checkpoints(tmp_path) == {"step_000006", "step_000009"}
    again = make_state(corpus, tmp_path, standing, max_steps=30, validate_every=3, monitor="loss", patience=2)
    fit(again)
    assert again.progress.step == 9


BETTER = {"bleu": "higher", "accuracy": "higher", "loss": "lower", "ppl": "lower"}
JUDGED = [  # how good a model is, NaN where its score is none; the best two steps, validations waited, decays after it
    (math.nan, [1], 0, 0),
    (1, [2, 1], 0, 0),
    (3, [3, 2], 0, 0),
    (2, [3, 4], 1, 1),
    (4, [5, 3], 0, 1),
    (math.nan, [5, 3], 1, 2),
    (4, [7, 5], 2, 3),  # as good is not better, but the later one is taken
    (2, [7, 5], 3, 4),
]


@pytest.mark.parametrize("monitor", BETTER)
def test_models_are_ranked_by_their_score(monitor: str, corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path, {"schedule": "plateau"}, monitor=monitor, keep=2, patience=3)
    progress, scores = state.progress, {}
    for step, (good, best, waiting, decays) in enumerate(JUDGED, 1):
        progress.step, score = step, good if BETTER[monitor] == "higher" else 10 - good
        record_validation(state, dict.fromkeys(BETTER, 5.0) | {monitor: score})
        scores[step] = (-math.inf if BETTER[monitor] == "higher" else math.inf) if math.isnan(score) else score
        assert [(one.score, one.step) for one in progress.best] == [(scores[step], step) for step in best]
        assert (progress.validated_step, progress.bad_validations, progress.decays) == (step, waiting, decays)
        assert (tmp_path / "checkpoints" / "best").read_text() == f"step_{best[0]:06d}\n"
        assert is_finished(state, 100) == (waiting == 3)
    state.run.optim.schedule = "constant"
    record_validation(state, dict.fromkeys(BETTER, 5.0) | {monitor: math.nan})
    assert (progress.bad_validations, progress.decays) == (4, 4)


TIED = [  # score, loss; the best two steps, validations waited, decays after it
    (0.0, 5.2, [1], 0, 0),
    (0.0, 4.0, [2, 1], 0, 0),
    (0.0, 4.5, [2, 3], 0, 0),  # worse, but the score has not left its floor
    (0.0, 4.5, [2, 4], 0, 0),
    (0.0004, 3.0, [5, 2], 0, 0),  # shown as 0.00
    (0.0001, 2.9, [6, 5], 0, 0),
    (math.nan, math.nan, [6, 5], 0, 0),
    (0.5, 3.5, [8, 6], 0, 0),
    (0.5, 3.6, [8, 9], 1, 1),
    (0.5, 3.4, [10, 8], 0, 1),
    (0.0, 1.0, [10, 8], 1, 2),
    (0.5, 3.4, [12, 10], 2, 3),
]


@pytest.mark.parametrize("monitor", ["bleu", "accuracy"])
def test_equal_scores_are_ranked_by_loss_and_a_score_at_its_floor_ends_nothing(
    monitor: str, corpus: Path, tmp_path: Path
) -> None:
    state = make_state(corpus, tmp_path, {"schedule": "plateau"}, monitor=monitor, keep=2, patience=2)
    progress = state.progress
    for step, (score, loss, best, waiting, decays) in enumerate(TIED, 1):
        progress.step = step
        record_validation(state, {monitor: score, "loss": loss})
        assert [one.step for one in progress.best] == best
        assert (progress.bad_validations, progress.decays, is_finished(state, 100)) == (waiting, decays, waiting == 2)
        assert find_checkpoint(str(tmp_path))[1].name == f"step_{best[0]:06d}"


def test_while_nothing_is_translated_right_training_goes_on_and_the_lowest_loss_is_best(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nmt.training.loop.bleu", lambda *_: 0.0)
    settings = {"max_steps": 12, "validate_every": 2, "patience": 2, "monitor": "bleu"}
    state = make_state(corpus, tmp_path, {"schedule": "plateau", "lr": 0.01}, **settings)
    assert fit(state) == 0.0 and state.progress.step == 12
    losses = {int(event["step"]): event["loss"] for event in read_events(tmp_path, "validate")}
    assert find_checkpoint(str(tmp_path))[1].name == f"step_{min(losses, key=lambda step: losses[step]):06d}"
    assert {event["lr"] for event in read_events(tmp_path, "train")} == {0.01}


def test_bleu_in_validation_is_of_greedy_translations_and_the_targets(corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path)
    sources, targets = (list(iter_column(state.valid, name)) for name in ("source", "target"))
    found = [
        [own[0].text for own in Translator(state.model.eval(), state.tokenizer, config, CPU).translate(sources)]
        for config in (SearchConfig(beam=1), SearchConfig(beam=5))
    ]
    targets[::2] = found[0][::2]
    state.valid = Dataset.from_dict({"source": sources, "target": targets})
    greedy, wider = (sacrebleu.corpus_bleu(texts, [targets]).score for texts in found)
    assert 99 > greedy > wider + 20
    assert validate(state)["bleu"] == pytest.approx(greedy) == read_events(tmp_path, "validate")[0]["bleu"]


def test_the_best_checkpoints_and_the_last_are_kept(corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path, {"lr": 0.01}, max_steps=16, validate_every=2, monitor="loss", keep=3)
    best = fit(state)
    losses = {int(event["step"]): event["loss"] for event in read_events(tmp_path, "validate")}
    ranked = sorted(losses, key=lambda step: losses[step])[:3]
    assert [one.step for one in state.progress.best] == ranked and best == losses[ranked[0]]
    assert list_checkpoints(tmp_path) == {f"step_{step:06d}" for step in (*ranked, 14, 16)}
    assert find_checkpoint(str(tmp_path))[1].name == f"step_{ranked[0]:06d}"


def test_a_validation_that_was_not_acted_on_is_made_again(corpus: Path, tmp_path: Path) -> None:
    """As where a signal comes when one is due: the checkpoint is of before, and the next process may die after it."""
    state = make_state(corpus, tmp_path, max_steps=4, validate_every=2)
    fit(state)
    state.progress.validated_step = 2
    save_state(state)
    again = make_state(corpus, tmp_path, max_steps=4, validate_every=2)
    assert [event["step"] for event in read_events(tmp_path, "validate")] == [2]
    fit(again)
    assert [event["step"] for event in read_events(tmp_path, "validate")] == [2, 4]


def test_a_plateau_lowers_the_learning_rate(corpus: Path, tmp_path: Path) -> None:
    standing = {"name": "sgd", "lr": 1e-9, "schedule": "plateau", "decay": 0.5}
    fit(make_state(corpus, tmp_path, standing, max_steps=8, validate_every=2, monitor="loss"))
    rates = [event["lr"] for event in read_events(tmp_path, "train")]
    validations = read_events(tmp_path, "validate")
    decays, best, expected = 0, math.inf, []
    for event in validations:
        expected.append(1e-9 * 0.5**decays)
        decays, best = decays + (event["loss"] >= best), min(best, event["loss"])
    assert rates == pytest.approx(expected) and rates[-1] < rates[0]


RATES = {  # of update n of 8, with a warm-up of 3
    "constant": lambda n: min(n / 3, 1),
    "inverse_sqrt": lambda n: min(n / 3, math.sqrt(3 / n)),
    "cosine": lambda n: n / 3 if n < 3 else math.cos((n - 3) / 5 * math.pi / 2) ** 2,
    "plateau": lambda n: min(n / 3, 1) / 4,  # after two plateaus
}


@pytest.mark.parametrize("schedule", RATES)
def test_updates_have_the_learning_rate_of_their_number(
    schedule: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"lr": 0.004, "schedule": schedule, "warmup": 3}
    state = make_state(corpus, tmp_path, settings, max_steps=8, log_every=1, validate_every=8)
    state.progress.decays = 2
    monkeypatch.setattr("nmt.training.loop.validate", lambda state: {"bleu": 0.0, "loss": 1.0})
    fit(state)
    shown = [(event["step"], event["lr"]) for event in read_events(tmp_path, "train")]
    assert [step for step, _ in shown] == [*range(1, 9)]
    assert [rate for _, rate in shown] == pytest.approx([0.004 * RATES[schedule](n) for n in range(1, 9)], abs=1e-15)


def trained(state: TrainState, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[int]]:
    """The pairs of each update of a training, and torch's seed at each micro-batch."""
    backward, rows, seeds = training_step.backward, [], []

    def noted(state: TrainState, indices: Any, total_steps: int) -> Any:
        rows.append(indices.tolist())
        return train_step(state, indices, total_steps)

    def seeded(*given: Any) -> Any:
        seeds.append(torch.initial_seed())
        return backward(*given)

    monkeypatch.setattr("nmt.training.loop.train_step", noted)
    monkeypatch.setattr("nmt.training.loop.validate", lambda state: {"bleu": 0.0, "loss": 1.0})
    monkeypatch.setattr(training_step, "backward", seeded)
    fit(state)
    monkeypatch.setattr(training_step, "backward", backward)
    return rows, seeds


def test_each_epoch_and_each_seed_has_an_order_and_draws_of_its_own(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs, drawn = [], []
    for seed, count in ((1, 2), (2, 1)):
        state = make_state(corpus, tmp_path / str(seed), max_epochs=count, batch_tokens=1000)
        state.run.seed = seed
        rows, seeds = trained(state, monkeypatch)
        size = len(rows) // count
        epochs += [rows[size * epoch : size * (epoch + 1)] for epoch in range(count)]
        drawn += seeds
    assert len(drawn) == len(set(drawn)) == sum(map(len, epochs))
    turns = [[len(rows) for rows in epoch] for epoch in epochs]
    assert turns[0] != turns[1] and turns[0] != turns[2] and sorted(turns[0]) == sorted(turns[1]) == sorted(turns[2])
    for epoch in epochs:
        assert sorted(row for rows in epoch for row in rows) == [*range(120)]


def test_processes_draw_apart(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr("nmt.training.step.world_size", lambda: 3)
    for number in range(3):
        monkeypatch.setattr("nmt.training.step.rank", lambda number=number: number)
        state = make_state(corpus, tmp_path / str(number), max_steps=2, accumulate=2)
        drawn += trained(state, monkeypatch)[1]
    assert len(set(drawn)) == len(drawn) == 3 * 2 * 2


@pytest.mark.parametrize(
    ("ends", "limit"),
    [
        ({"max_steps": 2}, "max_steps=2"),
        ({"max_epochs": 1}, "max_epochs=1"),
        ({"max_epochs": 1, "max_steps": 900}, None),
    ],
)
def test_what_ends_training_is_said(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    ends: dict[str, int], limit: str | None,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "nmt")
    state = make_state(corpus, tmp_path, **ends)
    monkeypatch.setattr("nmt.training.loop.validate", lambda state: {"bleu": 0.0, "loss": 1.0})
    fit(state)
    step = state.progress.step
    early = (
        f"train.max_epochs=1 ends training at step {step}, before train.max_steps=900; train.max_epochs=null removes"
    )
    assert any(early in message for message in caplog.messages) == (limit is None)
    assert f"train.{limit or 'max_epochs=1'} is reached" in caplog.messages


def test_the_end_does_not_depend_on_where_a_run_goes_on(corpus: Path, tmp_path: Path) -> None:
    """With other pieces in each epoch."""
    found = []
    for epoch in (0, 2):
        state = make_state(corpus, tmp_path, max_epochs=3)
        state.unsampled = replace(state.unsampled, sampling=0.5)
        state.progress.epoch = epoch
        batches = prepare_epoch(state)
        assert len(batches) > len(epoch_batches(state.unsampled, state.run.train, state.run.seed, epoch))
        found.append((count_total_steps(state, prepare_epoch(state)), state.train.source.ids.tolist()))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_a_model_gone_astray_ends_training_with_the_pairs_in_a_file(corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path, max_steps=8, max_skipped=3)
    with torch.no_grad():
        state.model.output.bias[5] = math.nan
    before = state.model.target_embedding.weight.detach().clone()
    with pytest.raises(UserError, match="3 updates in a row .* at step 3: .* smaller optim.lr"):
        fit(state)
    assert torch.equal(state.model.target_embedding.weight, before)
    indices = epoch_batches(state.train, state.run.train, state.run.seed, 0)[2]
    pairs = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [pair["pair"] - 1 for pair in pairs] == indices.tolist()
    lines = (corpus / "train.de").read_text(encoding="utf-8").splitlines()
    assert all(pair["source"] == lines[pair["pair"] - 1] for pair in pairs)
    assert "".join(pairs[0]["target_pieces"]).replace("▁", " ").strip() == pairs[0]["target"]
    assert not (tmp_path / "checkpoints").exists()


def test_failures_are_known_before_other_pairs_take_the_place_of_those(corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path, max_epochs=2, max_skipped=1, log_every=1000, validate_every=1000)
    with torch.no_grad():
        state.model.output.bias[5] = math.nan
    with pytest.raises(UserError, match="1 updates in a row"):
        fit(state)
    assert state.progress.epoch == 0


def test_an_update_that_fails_is_skipped_and_counted(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nmt")
    state = make_state(corpus, tmp_path, max_steps=8, max_skipped=2, log_every=4, save_every=5)
    sound, seen = training_step.backward, []

    def poisoned(*given: Any) -> Any:
        loss, gradients = sound(*given)
        if state.progress.step in (2, 6):
            gradients[0] = gradients[0] * math.inf
            seen.append(state.model.output.bias.detach().clone())
        if state.progress.step in (3, 7):
            seen.append(state.model.output.bias.detach().clone())
        return loss, gradients

    monkeypatch.setattr(training_step, "backward", poisoned)
    fit(state)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3]) and not torch.equal(seen[0], seen[2])
    shown = read_events(tmp_path, "train")
    assert [event["skipped"] for event in shown] == [1, 2] and all(math.isfinite(event["loss"]) for event in shown)
    assert caplog.text.count("1 of 4 updates skipped") == 2
    assert state.progress.skipped == 2 and state.progress.skipped_in_a_row == 0


@pytest.mark.parametrize(
    ("threads", "load", "slow", "said"),
    [
        (2, 0.1, False, None),
        (2, 9e3, False, r"[\d,]+ tokens/s, with a load of 9000.0 on .* OMP_NUM_THREADS=1 before"),
        (3, 0.1, True, r"[\d,]+ tokens/s after [\d,]+, with a load of 0.1 on .* OMP_NUM_THREADS=2 before"),
        (1, 9e3, True, None),
    ],
)
def test_a_machine_that_others_use_is_noticed_once(
    threads: int, load: float, slow: bool, said: str | None, corpus: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    clock, seconds = [0.0], [1.0]
    monkeypatch.setattr("nmt.training.loop.time.perf_counter", lambda: clock[0])
    state = make_state(corpus, tmp_path, max_steps=12, log_every=3)
    real = training_step.backward

    def timed(*given: Any) -> Any:
        clock[0] += seconds[0]
        seconds[0] = 9.0 if slow and state.progress.step >= 6 else 1.0
        return real(*given)

    monkeypatch.setattr(training_step, "backward", timed)
    fit(state)
    found = [message for message in caplog.messages if "OMP_NUM_THREADS" in message]
    assert len(found) == (said is not None) and all(re.match(str(said), message) for message in found)


def test_a_batch_too_large_for_memory_is_divided(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The update is that of the whole batch; where a single pair is too large, that is said."""
    found, sound = [], training_step.backward
    for most in (20, 7, 0):
        state = make_state(corpus, tmp_path / str(most), {"name": "sgd", "lr": 1.0}, max_steps=1)
        without_dropout(state)

        def short(run: TrainRun, model: Seq2Seq, batch: Batch, *given: Any, most: int = most) -> Any:
            if len(batch.source_BS) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return sound(run, model, batch, *given)

        monkeypatch.setattr(training_step, "backward", short)
        if not most:
            with pytest.raises(UserError, match="single pair of up to .* lower data.max_length=.*hidden=[0-9]+$"):
                train_step(state, np.arange(20), 1)
            state.run.train.r_drop = 4
            with pytest.raises(UserError, match="single pair of up to .*hidden=[0-9]+, or write train.r_drop=0"):
                train_step(state, np.arange(20), 1)
            break
        outcome = train_step(state, np.arange(20), 1)
        found.append((outcome.sums.target, outcome.sums.nats, state.model.state_dict()))
        said = caplog.text
        train_step(state, np.arange(20), 2)
        assert caplog.text == said  # it knows now
    torch.testing.assert_close(*found)
    assert "out of memory for 20 pairs of up to" in caplog.text and "train.accumulate=4" in caplog.text


def test_only_the_same_text_and_settings_are_resumed(corpus: Path, tmp_path: Path) -> None:
    state = make_state(corpus, tmp_path, max_steps=2)
    fit(state)
    state.progress.corpus = "other"
    save_checkpoint(tmp_path, state.model, state.tokenizer, state.run, state.optimizer, {"corpus": "other", "step": 2})
    with pytest.raises(UserError, match="training or validation text .* differs from"):
        make_state(corpus, tmp_path, max_steps=4)
    longer = TrainRun(train=TrainConfig(batch_tokens=500))
    with pytest.raises(UserError, match=r"train.batch_tokens=500 \(was 1500\)"):
        check_resumed_settings(longer, TrainRun())
    check_resumed_settings(TrainRun(train=TrainConfig(max_epochs=40, log_every=9)), TrainRun())


def test_a_folder_is_for_one_process_and_for_runs(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path), pytest.raises(UserError, match="another process"):
        lock_run_folder(tmp_path)
    with lock_run_folder(tmp_path):
        pass
    (tmp_path / "tokenizer.model").write_bytes(b"mine")
    for settings in ("", "layers: 6\n"):
        if settings:
            (tmp_path / "config.yaml").write_text(settings, encoding="utf-8")
        with pytest.raises(UserError, match="contains tokenizer.model but is not a run"):
            check_run_folder(tmp_path, TrainRun(overwrite=True))
    save_config(tmp_path, TrainRun())
    assert not check_run_folder(tmp_path, TrainRun())
    (tmp_path / "eval").mkdir()
    for resume_as in ("false", "auto", "true"):
        with pytest.raises(UserError, match="evaluations of a model whose checkpoints are gone"):
            check_run_folder(tmp_path, TrainRun(resume=resume_as))
    assert not check_run_folder(tmp_path, TrainRun(overwrite=True, resume="auto"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_in_which_another_has_trained_meanwhile_is_left_to_it(
    begun: bool, overwrite: bool, corpus: Path, tmp_path: Path
) -> None:
    """Between the look at a folder and its lock text is read, which may take long."""
    late = make_state(corpus, tmp_path)
    late.run = replace(late.run, resume="auto", overwrite=overwrite, precision="fp32")
    save_config(tmp_path, late.run)
    if begun:
        late.progress.step = 2
        save_state(late)
    start = find_starting_point(late.run, tmp_path, CPU, ())
    save_state(replace(late, progress=Progress(late.progress.corpus, step=4)))
    with pytest.raises(UserError, match="another process has trained in .* meanwhile; repeat the command"):
        open_run_folder(late, start)
    assert (
        find_last_checkpoint(tmp_path)
        == find_last_intact_checkpoint(tmp_path)
        == tmp_path / "checkpoints" / "step_000004"
    )
    assert late.progress.step == 2 * begun
    with open_run_folder(late, find_starting_point(late.run, tmp_path, CPU, ())):
        assert late.progress.step == (2 * begun if overwrite else 4)
    assert (find_last_checkpoint(tmp_path) is None) == overwrite


def test_checkpoints_are_found_verified_and_replaced(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state(corpus, tmp_path, max_steps=2)
    (tmp_path / "config.yaml").write_text("name: x\n", encoding="utf-8")
    left = tmp_path / "checkpoints" / ".step_000001.new"
    left.mkdir(parents=True)
    fit(state)
    assert list_checkpoints(tmp_path) == {"step_000002"}
    for step in (999_999, 1_000_000, 1_000_000):
        progress = {"corpus": "", "step": step}
        folder = save_checkpoint(tmp_path, state.model, state.tokenizer, state.run, state.optimizer, progress)
        verify_checkpoint(folder)
    (tmp_path / "checkpoints" / "last").unlink()
    assert (
        find_last_checkpoint(tmp_path)
        == find_last_intact_checkpoint(tmp_path)
        == tmp_path / "checkpoints" / "step_1000000"
    )
    (tmp_path / "checkpoints" / "step_3000000").mkdir()
    assert find_last_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_3000000"
    assert find_last_intact_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_1000000"  # the other is damaged
    assert load_file(folder / "model.safetensors").keys() == state.model.state_dict().keys()
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert find_checkpoint("step_000002") == (tmp_path, Path("step_000002"))
    (tmp_path / "a" / "link").mkdir(parents=True)
    link = tmp_path / "a" / "link" / "current"
    link.symlink_to(tmp_path / "checkpoints" / "step_000002")
    assert find_checkpoint(str(link)) == (tmp_path, link)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoints").symlink_to(tmp_path / "checkpoints")
    there = tmp_path / "b" / "checkpoints" / "step_000002"
    assert find_checkpoint(str(there)) == (tmp_path / "b", there)
    (folder / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="state.json is missing or damaged"):
        verify_checkpoint(folder)


def test_events_reach_tensorboard(corpus: Path, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    state = make_state(corpus, tmp_path, max_steps=4)
    state.tensorboard = tensorboard.SummaryWriter(str(tmp_path / "tensorboard"))
    fit(state)
    state.tensorboard.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [2, 4]
    assert found.Scalars("validate/loss")[0].value == pytest.approx(read_events(tmp_path, "validate")[0]["loss"])


def test_a_line_without_end_does_not_end_validation(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such pairs are left out and counted; where memory is short, batches are halved and nothing changes."""
    state = make_state(corpus, tmp_path, max_steps=1)
    scores = evaluate_loss(state.model, state.tokenizer, state.valid, CPU)
    long = {"source": ["Hund " * 20_000, "Ein Hund"], "target": ["A dog", "dog " * 5_000]}
    longer = concatenate_datasets([state.valid.select_columns([*long]), Dataset.from_dict(long)])
    assert evaluate_loss(state.model, state.tokenizer, longer, CPU) == scores
    assert "2 pairs of more than 1,000 pieces (first: 13, 14)" in caplog.text
    sound = state.model.loss

    def short(source_BS: torch.Tensor, *given: Any) -> Any:
        if len(source_BS) > 5:
            raise MemoryError
        return sound(source_BS, *given)

    monkeypatch.setattr(state.model, "loss", short)
    halved = evaluate_loss(state.model, state.tokenizer, state.valid, CPU)
    assert halved.pop("aer") is scores.pop("aer") is None and halved == pytest.approx(scores, rel=1e-5)


def test_what_validation_measures_is_what_forced_decoding_finds(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In nats a target piece, `</s>` included, whatever the batches."""
    state = make_state(corpus, tmp_path, {"lr": 0.1})
    for rows in prepare_epoch(state)[:10]:
        train_step(state, rows, 10)
    model, (source, target) = (
        state.model.eval(),
        (list(iter_column(state.valid, name)) for name in ("source", "target")),
    )
    pairs = list(zip(state.tokenizer.source.encode(source), state.tokenizer.target.encode(target), strict=True))
    tokens = sum(len(ids) + 1 for _, ids in pairs)
    assert tokens != sum(len(ids) + 1 for ids, _ in pairs)
    correct = 0
    with torch.inference_mode():
        for own, wanted in pairs:
            logits_RV, wanted_R = forced(model, make_batch([own], [wanted]))
            correct += int((logits_RV.argmax(1) == wanted_R).sum())
    assert correct > tokens / 20
    translator = Translator(model, state.tokenizer, SearchConfig(), CPU)
    loss = -sum(found.score for found in translator.score(source, target)) / tokens
    monkeypatch.setattr("nmt.training.validation.choose_batch_size", lambda *given: 5)
    scores = evaluate_loss(model, state.tokenizer, state.valid, CPU)
    assert (scores["loss"], scores["ppl"]) == pytest.approx((loss, math.exp(loss)), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(correct / tokens)


def test_a_report_is_of_all_target_tokens_since_the_last(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their cross-entropy in nats, which is not what label smoothing makes of it."""
    standing = {"name": "sgd", "lr": 1e-12}
    state = without_dropout(make_state(corpus, tmp_path, standing, max_steps=5, log_every=3, accumulate=2))
    with torch.no_grad():
        counts = np.bincount(state.train.target.ids, minlength=state.tokenizer.target.vocab_size)
        state.model.output.bias += torch.from_numpy(counts).log1p()
        batches = [collate(state.train, rows) for rows in prepare_epoch(state)[:3]]
        parts = [forced(state.model, batch) for batch in batches]
    logits_RV, wanted_R = (torch.cat(each) for each in zip(*parts, strict=True))
    loss = F.cross_entropy(logits_RV, wanted_R).item()
    accuracy = (logits_RV.argmax(1) == wanted_R).double().mean().item()
    source = sum(int((batch.source_BS != PAD).sum()) for batch in batches)
    assert source != len(wanted_R) and accuracy > 0.02
    monkeypatch.setattr("nmt.training.loop.validate", lambda state: {"bleu": 0.0, "loss": 1.0})
    fit(state)
    event = read_events(tmp_path, "train")[0]
    assert event["step"] == 3 and event["accuracy"] == pytest.approx(accuracy)
    assert (event["loss"], event["ppl"]) == pytest.approx((loss, math.exp(loss)), rel=1e-4)
    assert event["device_memory"] is None  # it is that of a GPU
    share = event["target_tokens_per_second"] / event["tokens_per_second"]
    assert share == pytest.approx(len(wanted_R) / (source + len(wanted_R)))
