"""Attention weights of each layer and each head, for the report."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nmt.config.model import LayerAndHead, ModelConfig
from nmt.decoding.translator import Translation, Translator
from nmt.model.seq2seq import Seq2Seq


class HeadWeights(NamedTuple):
    """The weights_TS of a layer and head, or their mean, by the index of a sentence pair."""

    shown: LayerAndHead
    weights: dict[int, np.ndarray | None]

    @property
    def label(self) -> str:
        layer, head = self.shown
        if layer is None and head is None:
            return "mean"
        parts = [] if layer is None else [f"layer {layer}"]
        return ", ".join([*parts, "mean of heads" if head is None else f"head {head}"])


def compute_head_weights(
    model: Seq2Seq,
    config: ModelConfig,
    translator: Translator,
    translations: Sequence[Translation],
    rows: Sequence[int],
) -> list[HeadWeights]:
    """Return the weights of each layer and head in the given translations, by forced decoding.

    What `model.attention.layer` and `.head` choose is left out, because the translations have it.
    """
    configured = LayerAndHead(config.attention.layer, config.attention.head)
    others = [shown for shown in config.layers_and_heads if shown != configured]
    heads = []
    for shown in others:
        model.decoder.show_attention(shown)
        weights = translator.compute_weights([translations[row] for row in rows])
        heads.append(HeadWeights(shown, dict(zip(rows, weights, strict=True))))
    model.decoder.show_attention(configured)
    return heads
