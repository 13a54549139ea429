"""Erasure: losses against a slow twin, Kendall's tau, links and what is left out."""

import itertools
import logging
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from builders import make_sentences, make_tokenizer, randomize_

from nmt.config import BOS, EOS, AttentionConfig, ModelConfig, SearchConfig
from nmt.data.tokenizer import Tokenizer
from nmt.data.word_links import GoldLinks
from nmt.decoding.translation import Translation
from nmt.decoding.translator import Translator
from nmt.evaluation.erasure import average_tau, count_links, erase_words, measure_erasure, normalize_losses
from nmt.model.seq2seq import Seq2Seq, build_model

SEARCH = SearchConfig(beam=2, max_length=8, max_source=60)
MODELS = {
    "recurrent": ModelConfig(embed=8, hidden=8),
    "transformer": ModelConfig(
        encoder="transformer", style="transformer", embed=8, hidden=8, attention=AttentionConfig(heads=2)
    ),
    "no attention": ModelConfig(embed=8, hidden=8, attention=AttentionConfig(score="none")),
}


def make_translator(config: ModelConfig, tokenizer: Tokenizer | None = None) -> tuple[Translator, Seq2Seq, Tokenizer]:
    tokenizer = tokenizer or make_tokenizer("bpe")
    torch.manual_seed(1)
    model = build_model(config, tokenizer.source.vocab_size, tokenizer.target.vocab_size).double().eval()
    model.dtype = torch.float64
    randomize_(model, 0.5)
    return Translator(model, tokenizer, SEARCH, torch.device("cpu")), model, tokenizer


def compute_scores(model: Seq2Seq, source_ids: Sequence[int], target_ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each target id, decoding one step at a time."""
    memory, state = model.start(torch.tensor([[*source_ids, EOS]]), torch.tensor([len(source_ids) + 1]))
    scores = []
    for step, (previous, label) in enumerate(itertools.pairwise([BOS, *target_ids])):
        features_1TD, _, state = model.decode(torch.tensor([[previous]]), state.make_room(step + 1), memory)
        scores.append(model.logits(features_1TD[0])[0].log_softmax(0)[label].item())
    return scores


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_losses_are_those_of_sources_without_a_word(name: str) -> None:
    translator, model, tokenizer = make_translator(MODELS[name])
    lines = [*make_sentences(6, seed=3), "ein seltenes Wort 👩‍👧", "狗在睡觉。", "Hund"]
    records = [options[0].record for options in translator.translate(lines)]
    assert not all(record.target_pieces[-1] == "</s>" for record in records)  # some were truncated
    for record, losses_TS in zip(records, erase_words(translator, records, ""), strict=True):
        source_ids = tokenizer.source.processor.piece_to_id(record.source_pieces[:-1])
        target_ids = tokenizer.target.processor.piece_to_id(record.target_pieces)
        expected_TS = np.zeros((len(record.target_words), len(record.source_words)))
        whole = compute_scores(model, source_ids, target_ids)
        for word in range(len(record.source_words)):
            kept = [id_ for id_, owner in zip(source_ids, record.source_word_of_piece, strict=False) if owner != word]
            for position, score in enumerate(compute_scores(model, kept, target_ids)):
                if (owner := record.target_word_of_piece[position]) >= 0:
                    expected_TS[owner, word] += whole[position] - score
        assert losses_TS is not None and np.abs(expected_TS).max() > 1e-3
        np.testing.assert_allclose(losses_TS, expected_TS, atol=1e-9)


def test_lines_without_losses_are_named(caplog: pytest.LogCaptureFixture) -> None:
    translator, *_ = make_translator(MODELS["recurrent"])
    sources = ["", "der Hund", " ".join(make_sentences(20))]
    translations = [options[0] for options in translator.translate(sources, keep_weights=True)]
    translations.append(Translation("der", ["▁w"] * 201 + ["</s>"], ["▁der", "</s>"]))
    with caplog.at_level(logging.WARNING, "nmt"):
        losses, metrics = measure_erasure(translator, translations, [], [], None)
    assert [losses_TS is None for losses_TS in losses] == [True, False, True, True]
    assert "erase=true leaves out 3 translations" in caplog.text and "(first: 1, 3, 4)" in caplog.text
    assert -1 <= metrics["erasure_tau"] <= 1 and metrics["erasure_aer"] is None
    assert measure_erasure(translator, [], [], [], None) == ([], {"erasure_tau": None, "erasure_aer": None})


@torch.inference_mode()
def test_gold_links_count_words_of_the_text() -> None:
    """Normalization turns a no-break space within a word into a space, which adds no word."""
    tokenizer = make_tokenizer("bpe", normalization="nmt_nfkc")
    translator, *_ = make_translator(MODELS["recurrent"], tokenizer)
    sources, references = ["der\u00a0Hund sieht die Katze", "ein Hund"], ["the dog\u00a0sees the cat", "a dog"]
    words = [[line.split(" ") for line in side] for side in (sources, references)]
    losses = erase_words(translator, translator.align(*words), "")
    assert [losses_TS.shape for losses_TS in losses if losses_TS is not None] == [(4, 4), (2, 2)]
    best = [[(int(row.argmax()), t) for t, row in enumerate(x) if row.max() > 0] for x in losses if x is not None]
    for wrong in (0, 1):  # all links right, and one that is not
        gold = [GoldLinks.from_pairs(links[wrong:], []) for links in best]
        _, metrics = measure_erasure(translator, [], sources, references, gold)
        found, sure = sum(map(len, best)), sum(len(links) - wrong for links in best)
        assert metrics["erasure_aer"] == pytest.approx(1 - 2 * sure / (found + sure))


def test_tau_is_averaged_where_it_is_defined() -> None:
    values = np.arange(5.0)
    assert average_tau([(values, np.exp(values)), (values, np.ones(5)), (values[:1], values[:1])]) == pytest.approx(1)
    assert average_tau([(values, np.exp(values)), (values, -values)]) == pytest.approx(0)
    assert average_tau([(values, np.ones(5))]) is None


def test_words_are_linked_to_what_they_lose_most_without() -> None:
    losses = [np.array([[0.5, 2.0, -3.0], [-1.0, -1.0, -0.5]]), None, np.zeros((0, 2))]
    gold = [GoldLinks.from_pairs([(1, 0)], [(2, 1)]), GoldLinks.from_pairs([(0, 0)], []), GoldLinks.from_pairs([], [])]
    counts = count_links(losses, gold)
    assert (counts.predicted, counts.sure, counts.predicted_sure) == (1, 1, 1)  # a word that loses nothing has no link
    np.testing.assert_allclose(normalize_losses(losses[0]), [[0.2, 0.8, 0], [0, 0, 0]])
