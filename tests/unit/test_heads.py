"""Attention weights of each layer and head for the report."""

import numpy as np
import pytest
import torch
from builders import make_sentences, make_tokenizer, randomize_

from nmt.config import AttentionConfig, ModelConfig, SearchConfig
from nmt.decoding.translation import Translation
from nmt.decoding.translator import Translator
from nmt.evaluation.heads import compute_head_weights
from nmt.model.seq2seq import build_model

MODELS = {
    "recurrent": (
        ModelConfig(embed=8, hidden=8, attention=AttentionConfig(heads=2)),
        ["Attention: head 0", "Attention: head 1"],
    ),
    "recurrent, one head shown": (
        ModelConfig(embed=8, hidden=8, attention=AttentionConfig(heads=2, head=1)),
        ["Attention: mean of heads", "Attention: head 0"],
    ),
    "transformer": (
        ModelConfig(style="transformer", embed=8, hidden=8, decoder_layers=2, attention=AttentionConfig(heads=2)),
        [f"Attention: layer {layer}, {head}" for layer in (0, 1) for head in ("mean of heads", "head 0", "head 1")],
    ),
    "one head": (ModelConfig(embed=8, hidden=8), []),
    "coverage": (ModelConfig(embed=8, hidden=8, attention=AttentionConfig(heads=2, coverage=True)), []),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_heads_average_to_those_of_search(name: str) -> None:
    config, labels = MODELS[name]
    tokenizer = make_tokenizer("bpe")
    torch.manual_seed(1)
    model = build_model(config, tokenizer.source.vocab_size, tokenizer.target.vocab_size).double().eval()
    model.dtype = torch.float64
    randomize_(model, 0.3)
    search = SearchConfig(beam=2, max_length=8, max_source=60)
    translator = Translator(model, tokenizer, search, torch.device("cpu"))
    sources = ["", *make_sentences(8, seed=3), "ein seltenes Wort 👩‍👧", " ".join(make_sentences(12))]

    def translate() -> list[Translation]:
        return [options[0] for options in translator.translate(sources, keep_weights=True)]

    translations = translate()
    heads = compute_head_weights(model, config, translator, translations, range(len(sources)))
    assert [head.label for head in heads] == labels
    weights = {head.label: head.weights for head in heads}
    single = [label for label in labels if "mean" not in label]
    aligned = 0
    for row, translation in enumerate(translations):
        if translation.source_pieces.count("</s>") != 1:  # an empty line, and one translated in parts
            assert all(head.weights[row] is None for head in heads)
            continue
        actual_TS = translation.record.word_weights()
        expected_TS = actual_TS
        if name == "recurrent, one head shown":
            expected_TS = 2 * weights["Attention: mean of heads"][row] - weights["Attention: head 0"][row]
        elif single:
            expected_TS = np.mean([weights[label][row] for label in single], axis=0)
        assert expected_TS is not None and actual_TS is not None
        np.testing.assert_allclose(expected_TS, actual_TS, atol=1e-6)
        aligned += 1
    assert aligned > 4 and aligned < len(sources) - 1
    for before, after in zip(translations, translate(), strict=True):  # what is shown is as configured again
        np.testing.assert_array_equal(before.weights_TS, after.weights_TS)
