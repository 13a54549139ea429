"""The complete model: embeddings, encoder, decoder and output layer.

Shapes: B sentences, N rows (the hypotheses of all sentences, those of a sentence adjacent; N = B in training), S source
and T target positions, E embedding size, D decoder size (of features, half of it with maxout), G gates x D of a decoder
layer, R target tokens (without padding if it is dropped), V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config import PAD
from nmt.config.model import ModelConfig
from nmt.errors import UserError
from nmt.model.decoder import RecurrentDecoder
from nmt.model.encoder import RecurrentEncoder
from nmt.model.kernels import KERNELS
from nmt.model.kernels.linear import Linear
from nmt.model.kernels.recurrence import RNN
from nmt.model.reference import Loss
from nmt.model.transformer import TransformerDecoder, TransformerEncoder
from nmt.system.memory import is_out_of_memory

# Devices that drop padding before the output layer. On others, the host would have to wait for the number of tokens.
PADDING_DROP_DEVICES = ("cpu",)
MAX_TABLE_NUMEL = 2**25  # largest number of elements of `Seq2Seq.inputs_VG`


class Seq2Seq(nn.Module):
    """Embeddings, encoder, decoder and output layer.

    In training, parameters are kept in fp32 (or fp64). `dtype` is that of the tensors between embeddings and loss;
    sums and normalizations are at least fp32.
    """

    # For inference, the result of the bottom decoder layer's `project` for each token, if it is small enough.
    inputs_VG: Tensor | None = None

    def __init__(self, config: ModelConfig, source_vocab: int, target_vocab: int) -> None:
        super().__init__()
        kernels = KERNELS[config.kernels]
        self.is_fast = kernels.Linear is Linear  # the reference version has no prepared weights and no CUDA graphs
        self.cross_entropy = kernels.cross_entropy
        self.features = config.features
        self.dtype = torch.float32
        self.target_embedding = build_embedding(target_vocab, config.embed)
        is_shared = config.tie == "three"
        self.source_embedding = self.target_embedding if is_shared else build_embedding(source_vocab, config.embed)
        self.encoder = ENCODER_CLASSES[config.encoder](config)
        self.decoder: RecurrentDecoder | TransformerDecoder = DECODER_CLASSES[config.style](config)
        self.attends = config.attention.score != "none"
        self.max_source_positions = self.decoder.max_source_positions  # later ones get no attention; None: unlimited
        self.dropout = kernels.Dropout(config.dropout)
        is_tied = config.tie != "none"
        needs_map = is_tied and config.features != config.embed
        self.to_embedding = kernels.Linear(config.features, config.embed) if needs_map else None
        self.output = kernels.Linear(config.embed if is_tied else config.features, target_vocab)
        nn.init.zeros_(self.output.bias)
        if is_tied:
            self.output.weight = self.target_embedding.weight

    def prepare_for_inference(self, int8: bool) -> None:
        """Lay out the weights for translation. They must not change after that.

        With `int8`, linear maps and recurrent layers that run in a step loop are quantized, and nothing else. The
        reference version of a model always computes with its parameters, and refuses `int8` with a `UserError`.
        """
        if not self.is_fast:
            if int8:
                raise UserError(
                    "precision=int8 needs model.kernels=fast, and this model has reference; use precision=fp32"
                )
            return
        step_layers = list(self.decoder.layers) if self.decoder.has_step_loop else []
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepare_for_inference(int8)
            elif isinstance(module, RNN) and module not in step_layers:
                module.prepare_layer_for_inference()
        if not step_layers:
            return
        for rnn in step_layers:
            rnn.prepare_for_inference(int8)
        table_VE, bottom = self.target_embedding.weight.detach(), self.decoder.layers[0]
        assert isinstance(bottom, RNN)
        if len(table_VE) * len(bottom.bias_ih) <= MAX_TABLE_NUMEL:
            self.inputs_VG = bottom.project(table_VE)

    def start(self, source_BS: Tensor, length_B: Tensor) -> tuple[Any, Any]:
        """Encode sources, which end with `</s>`. Return memory and initial decoder state, one row per sentence.

        Their types are those of the decoder's `start`.
        """
        embedded_BSE = self.dropout(self.source_embedding(source_BS).to(self.dtype))
        outputs_BSM, lasts = self.encoder(embedded_BSE, length_B)
        return self.decoder.start(outputs_BSM, lasts, length_B)

    def decode(self, tokens_NT: Tensor, state: Any, memory: Any) -> tuple[Tensor, Tensor | None, Any]:
        """Run the decoder over T input tokens. Unless the state is that of `start`, it must have room for them.

        Returns features_NTD, which predict the token after each input token, the attention weights_NTS (None without
        attention) and the new state.
        """
        embedded_NTE = self.dropout(self.target_embedding(tokens_NT).to(self.dtype))
        inputs_NTG = None if self.inputs_VG is None else F.embedding(tokens_NT, self.inputs_VG)
        return self.decoder(embedded_NTE, state, memory, inputs_NTG)

    def to_output(self, features: Tensor) -> Tensor:
        """Return the input of the output layer: features after dropout, mapped to the embedding size if tied."""
        features = self.dropout(features)
        return features if self.to_embedding is None else self.to_embedding(features)

    def logits(self, features: Tensor) -> Tensor:
        """Apply the output layer: (..., D) -> (..., V)."""
        return self.output(self.to_output(features))

    def loss(
        self, source_BS: Tensor, length_B: Tensor, target_BT: Tensor, smoothing: float = 0.0, r_drop: float = 0.0
    ) -> tuple[Loss, Tensor | None]:
        """Return the loss with teacher forcing and the attention weights_BTS.

        `target_BT` is `<s> y_1 ... y_n </s>` and padding, which has no loss. With `r_drop`, the second half of the
        batch must repeat the first.
        """
        memory, state = self.start(source_BS, length_B)
        features_BTD, weights, _ = self.decode(target_BT[:, :-1], state, memory)
        features_RD, target_R = features_BTD.flatten(0, 1), target_BT[:, 1:].flatten()
        if target_R.device.type in PADDING_DROP_DEVICES:
            inside_R = (target_R != PAD).nonzero().squeeze(1)
            features_RD, target_R = features_RD.index_select(0, inside_R), target_R[inside_R]
        x_RD, output = self.to_output(features_RD), self.output
        loss = self.cross_entropy(
            x_RD, output.weight, output.bias, target_R, smoothing, r_drop, output.inference_fn, PAD
        )
        return loss, weights


def build_embedding(vocabulary: int, size: int) -> nn.Embedding:
    """Return an embedding with random weights, small enough to serve as an output layer too."""
    table = nn.Embedding(vocabulary, size, padding_idx=PAD)
    nn.init.normal_(table.weight, std=size**-0.5)
    nn.init.zeros_(table.weight.detach()[PAD])
    return table


def build_model(config: ModelConfig, source_vocab: int, target_vocab: int) -> Seq2Seq:
    """Return a model with random parameters, drawn from PyTorch's global generator.

    Raises:
        UserError: the model does not fit into memory.
    """
    try:
        return Seq2Seq(config, source_vocab, target_vocab)
    except (RuntimeError, TypeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory for a model with model.embed={config.embed} model.hidden={config.hidden} and vocabularies "
            f"of {source_vocab:,} and {target_vocab:,} pieces; reduce model.embed, model.hidden or the vocabulary"
        ) from None


ENCODER_CLASSES = {"rnn": RecurrentEncoder, "transformer": TransformerEncoder}
DECODER_CLASSES = {
    "bahdanau": RecurrentDecoder,
    "luong": RecurrentDecoder,
    "gnmt": RecurrentDecoder,
    "transformer": TransformerDecoder,
}
