"""The whole model: embeddings, encoder, decoder, output layer.

Shapes: B sentences, N rows (sentence-major hypotheses; N = B in training), S source and T target positions, E embedding
size, D decoder size (of features with maxout half of it), G gates x D of a decoder layer, R target tokens (without
padding where it is dropped), V vocabulary.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config import PAD
from nmt.config.model import ModelConfig
from nmt.errors import UserError
from nmt.model.attention import Weights
from nmt.model.decoder import Decoder, DecoderState
from nmt.model.encoder import Encoder
from nmt.model.kernels.linear import Dropout, Linear
from nmt.model.loss import Loss, cross_entropy
from nmt.model.recurrence import RNN
from nmt.model.windows import Memory

DROPPING = ("cpu",)  # devices that drop padding before the output layer; others would wait to learn what is left
TOO_LARGE = re.compile("allocate|[oO]verflow|out of memory|invalid shape|too large")
TABLE = 2**25  # numbers in the table of `Seq2Seq.inputs_VG` at most


class Seq2Seq(nn.Module):
    """Embeddings, encoder, decoder, output layer. In training parameters stay in fp32 (or fp64); `dtype` is that of the
    tensors between embeddings and loss, but what normalizes or sums is in fp32 at least."""

    inputs_VG: Tensor | None = None  # what each token adds to the gates of the decoder's loop, once weights are fixed

    def __init__(self, config: ModelConfig, source_vocab: int, target_vocab: int) -> None:
        super().__init__()
        self.features = config.features
        self.dtype = torch.float32
        self.target_embedding = embedding(target_vocab, config.embed)
        shared = config.tie == "three"
        self.source_embedding = self.target_embedding if shared else embedding(source_vocab, config.embed)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.attends = self.decoder.attention.context_size > 0
        self.reach = self.decoder.attention.reach  # how many positions of a source attention can reach; None: all
        self.dropout = Dropout(config.dropout)
        tied = config.tie != "none"
        self.to_embedding = Linear(config.features, config.embed) if tied and config.features != config.embed else None
        self.output = Linear(config.embed if tied else config.features, target_vocab)
        nn.init.zeros_(self.output.bias)
        if tied:
            self.output.weight = self.target_embedding.weight

    def prepare_for_inference(self, int8: bool) -> None:
        """Fix the weights for translation: those of linear maps and of recurrent layers that run step by step in int8
        if asked. Layers that run over a whole sentence keep their precision, and so does all that is pointwise."""
        stepping = set(self.decoder.layers) if self.decoder.looping else set()
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare_for_inference(int8)
            elif isinstance(module, RNN) and module not in stepping:
                module.prepare_layer_for_inference()
        if not stepping:
            return
        for rnn in stepping:
            rnn.prepare_for_inference(int8)
        table_VE, bottom = self.target_embedding.weight.detach(), self.decoder.layers[0]
        assert isinstance(bottom, RNN)
        if len(table_VE) * len(bottom.bias_ih) <= TABLE:
            self.inputs_VG = bottom.project(table_VE)

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[Memory, DecoderState]:
        """Encode: memory and the first decoder state, one row a sentence. Sources end with `</s>`."""
        embedded_BSE = self.dropout(self.source_embedding(source_BS).to(self.dtype))
        outputs_BSM, lasts = self.encoder(embedded_BSE, length_B)
        return self.decoder.start(outputs_BSM, lasts, length_B)

    def decode(
        self, tokens_NT: Tensor, state: DecoderState, memory: Memory
    ) -> tuple[Tensor, Weights | None, DecoderState]:
        """T tokens in, features_NTD of the T tokens after them out, with attention weights_NTW (None where there is no
        attention) and the state after."""
        embedded_NTE = self.dropout(self.target_embedding(tokens_NT).to(self.dtype))
        inputs_NTG = None if self.inputs_VG is None else F.embedding(tokens_NT, self.inputs_VG)
        return self.decoder(embedded_NTE, state, memory, inputs_NTG)

    def to_output(self, features: Tensor) -> Tensor:
        """Features as the output layer wants them."""
        features = self.dropout(features)
        return features if self.to_embedding is None else self.to_embedding(features)

    def logits(self, features: Tensor) -> Tensor:
        """The output layer: (..., D) -> (..., V)."""
        return self.output(self.to_output(features))

    def loss(
        self, source_BS: Tensor, length_B: Tensor, target_BT: Tensor, smoothing: float = 0.0, r_drop: float = 0.0
    ) -> tuple[Loss, Weights | None]:
        """Teacher forcing. `target_BT` is `<s> y_1 ... y_n </s>` and padding, which has no loss. With `r_drop` the
        second half of the batch is the first once more. Returns the loss and the attention weights_BTW."""
        memory, state = self.start(source_BS, length_B)
        features_BTD, weights, _ = self.decode(target_BT[:, :-1], state, memory)
        features_RD, wanted_R = features_BTD.flatten(0, 1), target_BT[:, 1:].flatten()
        if wanted_R.device.type in DROPPING:
            inside_R = (wanted_R != PAD).nonzero().squeeze(1)
            features_RD, wanted_R = features_RD.index_select(0, inside_R), wanted_R[inside_R]
        x_RD, output = self.to_output(features_RD), self.output
        loss = cross_entropy(x_RD, output.weight, output.bias, wanted_R, smoothing, r_drop, output.inference_fn, PAD)
        return loss, weights


def embedding(vocabulary: int, size: int) -> nn.Embedding:
    table = nn.Embedding(vocabulary, size, padding_idx=PAD)
    nn.init.normal_(table.weight, std=size**-0.5)  # small enough to serve as an output layer too
    nn.init.zeros_(table.weight.detach()[PAD])
    return table


def build_model(config: ModelConfig, source_vocab: int, target_vocab: int) -> Seq2Seq:
    """A model with fresh parameters, drawn from torch's global generator.

    Raises:
        UserError: it is too large for memory.
    """
    try:
        return Seq2Seq(config, source_vocab, target_vocab)
    except (RuntimeError, TypeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not TOO_LARGE.search(str(error)):
            raise
        raise UserError(
            f"out of memory for a model with model.embed={config.embed} model.hidden={config.hidden} and "
            f"{source_vocab:,} and {target_vocab:,} pieces; make it smaller"
        ) from None
