"""Weights that the report can show instead of attention: above all those of each layer and each head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nmt.config.model import LayerAndHead, ModelConfig
from nmt.decoding.translation import Translation
from nmt.decoding.translator import Translator
from nmt.model.seq2seq import Seq2Seq


@dataclass(frozen=True, slots=True)
class WordWeights:
    """Weights of target words x source words that can be shown instead of attention, by the index of the pair."""

    label: str
    weights: dict[int, np.ndarray | None]


def compute_head_weights(
    model: Seq2Seq,
    config: ModelConfig,
    translator: Translator,
    translations: Sequence[Translation],
    rows: Sequence[int],
) -> list[WordWeights]:
    """Return the weights of each layer and head in the given translations, by forced decoding.

    What `model.attention.layer` and `.head` choose is left out, because the translations have it. An empty line and one
    translated in parts have no weights.
    """
    configured = LayerAndHead(config.attention.layer, config.attention.head)
    others = [shown for shown in config.layers_and_heads if shown != configured]
    heads = []
    for shown in others:
        model.decoder.show_attention(shown)
        matrices = translator.compute_weights([translations[row] for row in rows])
        weights = {
            row: replace(translations[row].record, weights=weights_TS).word_weights()
            for row, weights_TS in zip(rows, matrices, strict=True)
        }
        heads.append(WordWeights(describe_head(shown), weights))
    model.decoder.show_attention(configured)
    return heads


def describe_head(shown: LayerAndHead) -> str:
    layer, head = shown
    parts = [] if layer is None else [f"layer {layer}"]
    return f"Attention: {', '.join([*parts, 'mean of heads' if head is None else f'head {head}'])}"
