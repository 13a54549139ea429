"""Tests of guided alignment: reading gold links, alignment targets of batches, and the loss."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import TINY_SETTINGS, run_ok, write_corpus

from nmt.config import EOS, DataConfig, ModelConfig, OptimConfig, TokenizerConfig, TrainConfig, TrainRun
from nmt.data.batch import make_batch
from nmt.data.batching import batch_alignment_targets, collate
from nmt.data.corpus import get_gold_links, load_pairs
from nmt.data.encoding import encode_corpus, get_or_train_tokenizer
from nmt.data.resampling import resample_pairs
from nmt.data.tokenizer import group_by_spaces, train_tokenizer
from nmt.decoding.alignment import extract_links
from nmt.errors import UserError
from nmt.model.reference import Loss
from nmt.model.seq2seq import build_model
from nmt.system.device import prepare_model
from nmt.train import read_corpus
from nmt.training.backward import add_attention_losses, guidance_loss
from nmt.training.data import TrainingData
from nmt.training.optim import build_optimizer
from nmt.training.progress import Progress
from nmt.training.state import TrainState
from nmt.training.step import train_step


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a corpus with gold links."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), train=80, valid=10, test=5)


def make_run(corpus: Path, **data: object) -> TrainRun:
    defaults = {"format": "text", "path": str(corpus), "cache": str(corpus / "cache"), "alignments": "links"}
    return TrainRun(
        data=DataConfig(**defaults | data),
        tokenizer=TokenizerConfig(vocab_size=420),
        train=TrainConfig(guided_alignment=0.5),
    )


@pytest.mark.parametrize("sampling", [0.0, 0.3])
def test_batches_contain_alignment_targets(corpus: Path, sampling: float) -> None:
    run = make_run(corpus)
    pairs = load_pairs(run.data, "train")
    gold = get_gold_links(pairs)
    assert gold is not None
    tokenizer = get_or_train_tokenizer(pairs, run)
    encoded = dataclasses.replace(encode_corpus(pairs, tokenizer, run), sampling=sampling)
    encoded = resample_pairs(encoded, 1, 3) if sampling else encoded
    indices = np.array([5, 1, 17, 30])
    batch = collate(encoded, indices)
    assert batch.alignment_BTS.shape == (4, batch.target_BT.shape[1] - 1, batch.source_BS.shape[1])
    for row, index in enumerate(indices):
        source = tokenizer.source.pieces(batch.source_BS[row, : batch.source_length_B[row]].tolist())
        target = tokenizer.target.pieces(batch.target_BT[row, 1 : batch.target_length_B[row] + 1].tolist())
        alignment_TS = batch.alignment_BTS[row].numpy()
        assert alignment_TS.sum() == pytest.approx(len(target)) and not alignment_TS[len(target) :].any()
        word_indices = group_by_spaces(source)[1], group_by_spaces(target)[1]
        links = set(extract_links(alignment_TS[: len(target), : len(source)], *word_indices))
        assert links <= gold[index].possible
        assert {t for _, t in links} == {t for _, t in gold[index].possible}
        assert alignment_TS[len(target) - 1, len(source) - 1] == 1 and target[-1] == tokenizer.target.pieces([EOS])[0]


def test_guidance_loss_is_minimal_at_targets() -> None:
    torch.manual_seed(0)
    alignment_BTS = torch.softmax(torch.randn(2, 3, 4, dtype=torch.float64), 2)
    alignment_BTS[1, 2] = 0  # padding
    weights_BTS = alignment_BTS.clone()
    weights_BTS[1, 2] = 0.25
    scores_BTS = weights_BTS.log().requires_grad_()
    loss = guidance_loss(torch.softmax(scores_BTS, 2), alignment_BTS)
    torch.testing.assert_close(loss, -torch.xlogy(alignment_BTS, alignment_BTS).sum())
    loss.backward()
    assert scores_BTS.grad is not None and scores_BTS.grad.abs().max() < 1e-12
    assert guidance_loss(torch.zeros(2, 3, 4), alignment_BTS.float()).isfinite()


def test_alignment_targets_with_normalization() -> None:
    """Links count words of the original text, where nmt_nfkc splits at no-break spaces and drops zero-width spaces."""
    pairs = [("10\u00a0000 Euro bar", "10\u00a0000 euros cash"), ("\u200b a▁b c", "d e"), ("ohne Links", "no links")]
    tokenizers = [
        train_tokenizer([s for s, _ in pairs], [t for _, t in pairs], config)
        for config in (TokenizerConfig(vocab_size=300, normalization=n) for n in ("identity", "nmt_nfkc"))
    ]
    gold = {"sure": [[(0, 0), (1, 1), (2, 2)], [(1, 0), (2, 1)], []], "possible": [[], [], []]}
    texts = gold | {"source": [s for s, _ in pairs], "target": [t for _, t in pairs]}
    for tokenizer in tokenizers:
        sources, targets = tokenizer.source.encode(texts["source"]), tokenizer.target.encode(texts["target"])
        alignment_BTS = batch_alignment_targets(tokenizer, texts, sources, targets).numpy()
        for row, links in enumerate(gold["sure"]):
            source = tokenizer.source.word_indices(texts["source"][row], [*sources[row], EOS])
            target = tokenizer.target.word_indices(texts["target"][row], [*targets[row], EOS])
            assert extract_links(alignment_BTS[row, : len(target), : len(source)], source, target) == links
        assert tokenizer.source.word_indices(texts["source"][0], sources[0])[-1] == 2
        assert not alignment_BTS[2].any()


def test_guidance_weight_grows_with_progress() -> None:
    alignment_BTS = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    batch = make_batch([[5, 6]], [[7]])._replace(alignment_BTS=alignment_BTS)
    weights_BTS = torch.softmax(torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(1)), 2)
    loss = Loss(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(1))
    added = -0.4 * (0.5 * weights_BTS[0, 0, :2].log().sum() + weights_BTS[0, 1, 2].log())
    for share in (0.0, 0.25, 1.0):
        config = TrainConfig(guided_alignment=0.4)
        total = add_attention_losses(config, batch, loss.smoothed, weights_BTS, share)
        torch.testing.assert_close(total, 3 + share * added)


def test_coverage_loss() -> None:
    """See et al. 2017, eq. 13."""
    batch = make_batch([[5, 6], [5]], [[7, 8, 9], [7]])
    weights_BTS = torch.softmax(torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)), 2)
    loss = Loss(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(1))
    expected = 0.0
    for row, pieces in enumerate((4, 2)):  # including `</s>`
        coverage_S = torch.zeros(3)
        for weights_S in weights_BTS[row, :pieces]:
            expected += sum(min(a, c) for a, c in zip(weights_S.tolist(), coverage_S.tolist(), strict=True))
            coverage_S += weights_S
    assert expected > 0.5
    for weight in (0.0, 0.4, 2.0):
        config = TrainConfig(coverage_loss=weight)
        total = add_attention_losses(config, batch, loss.smoothed, weights_BTS, torch.tensor(0.3))
        assert total.item() == pytest.approx(3 + weight * expected)


def test_update_with_guided_alignment_matches_reference(corpus: Path, tmp_path: Path) -> None:
    """In update n of 8, the guidance loss has n / 8 of its final weight."""
    sgd = OptimConfig(name="sgd", lr=0.5, clip=None)
    run = dataclasses.replace(make_run(corpus), model=ModelConfig(embed=8, hidden=16, dropout=0.0), optim=sgd)
    encoded, valid, key = read_corpus(run, None)
    torch.manual_seed(1)
    model = build_model(run.model, encoded.tokenizer.source.vocab_size, encoded.tokenizer.target.vocab_size)
    cpu, rows = torch.device("cpu"), np.arange(6)
    prepare_model(model, "fp64", cpu, training=True)
    optimizer = build_optimizer(run.optim, model.parameters())
    progress = Progress(key)
    data = TrainingData(run, encoded, valid, progress)
    state = TrainState(run, tmp_path, cpu, model, optimizer, data, progress)
    batch = collate(encoded, rows)
    for n in (1, 3, 8):
        loss, weights = model.loss(batch.source_BS, batch.source_length_B, batch.target_BT, run.optim.label_smoothing)
        assert weights is not None
        links = guidance_loss(weights, batch.alignment_BTS)
        ((loss.smoothed + 0.5 * n / 8 * links) / batch.target_length_B.sum()).backward()
        expected = [parameter.detach() - 0.5 * parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        state.progress.step = n - 1
        assert not train_step(state, rows, 8).failed
        actual = [parameter.detach() for parameter in model.parameters()]
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_guided_alignment_lowers_aer(tmp_path: Path) -> None:
    """Compare the alignment error rate at validation of two short runs."""
    corpus, error_rates = write_corpus(tmp_path, train=600, valid=40), []
    for weight in (0, 1):
        settings = ("data=text", f"data.path={corpus}", "data.alignments=links", f"train.guided_alignment={weight}")
        run_ok("train", f"name=run{weight}", *settings, *TINY_SETTINGS, "train.max_epochs=2", folder=tmp_path)
        lines = (tmp_path / "runs" / f"run{weight}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        error_rates.append(json.loads(lines[-1])["aer"])
    assert error_rates[1] < error_rates[0] - 0.1


def test_invalid_gold_links_are_rejected(corpus: Path) -> None:
    with pytest.raises(UserError, match="data.alignments=links needs data.format=text"):
        make_run(corpus, format="tsv")
    run = make_run(corpus, alignments="nothing")
    pairs = load_pairs(run.data, "train")
    assert get_gold_links(pairs) is None
    tokenizer = get_or_train_tokenizer(pairs, run)
    with pytest.raises(UserError, match="train.guided_alignment=0.5 needs gold links"):
        encode_corpus(pairs, tokenizer, run)
    for bad, message in (
        ("0-0\n99-0\n" + "\n" * 8, r"valid.bad:2: '99-0' is out of range"),
        ("0-0\n0_0\n" + "\n" * 8, r"valid.bad:2: '0_0' is not a link"),
        ("0-0\n", "valid.bad has 1 lines for 10 pairs"),
    ):
        (corpus / "valid.bad").write_text(bad, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            load_pairs(make_run(corpus, alignments="bad").data, "valid")
