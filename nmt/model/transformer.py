"""The Transformer's encoder and decoder (Vaswani et al. 2017), built on the same `Attention` as the recurrent decoders.

Every score, window and normalizer of `attention.py` can take the place of scaled dot products: `model.self_attention`.

Shapes: B sentences, N rows (N = B x K, with the K hypotheses of a sentence adjacent; K = 1 in training), S source and T
target positions, C positions that the state of the decoder has room for, E embedding size, M encoder and D decoder
size. H heads: in shapes that contain H, sizes are per head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmt.config.model import LayerAndHead, ModelConfig
from nmt.model.attention import Attention, AttentionContext
from nmt.model.kernels import KERNELS
from nmt.model.numerics import accumulation_dtype
from nmt.model.parts import Parts, round_up_room
from nmt.model.windows import Memory, build_memory


def encode_positions(position: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return the sinusoids of positions, with shape (*position.shape, size), Vaswani et al. 2017, section 3.5.

    PE(p, 2i) = sin(p / 10000^(2i / size)), PE(p, 2i + 1) = cos(p / 10000^(2i / size)).
    """
    exact = accumulation_dtype(dtype)
    exponents = torch.arange(0, size, 2, device=position.device, dtype=exact) / size
    angles = position.unsqueeze(-1).to(exact) * 10000**-exponents
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :size].to(dtype)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that casts its weights to the dtype of its input (Ba et al. 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class TransformerInput(nn.Module):
    """Embeddings times the square root of their size, mapped to the model size if it is another, plus positions."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        self.scale = config.embed**0.5
        self.size = size
        self.map: nn.Module = nn.Identity()
        if config.embed != size:
            self.map = KERNELS[config.kernels].Linear(config.embed, size, bias=False)

    def forward(self, embedded: Tensor, position: Tensor) -> Tensor:
        return self.map(embedded * self.scale) + encode_positions(position, self.size, embedded.dtype)


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2, Vaswani et al. 2017, eq. 2, with dropout of the hidden values."""

    def __init__(self, config: ModelConfig, size: int) -> None:
        super().__init__()
        kernels = KERNELS[config.kernels]
        inner = config.feed_forward or 4 * config.hidden
        self.inner = kernels.Linear(size, inner)
        self.outer = kernels.Linear(inner, size)
        self.dropout = kernels.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.dropout(F.relu(self.inner(x))))


class TransformerEncoderLayer(nn.Module):
    """x' = x + SelfAttention(norm(x)), then x' + FeedForward(norm(x')), with dropout of what is added.

    Normalization comes before each part, not after the sum as in the paper, since deep models then train without
    warm-up (Xiong et al. 2020).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kernels = KERNELS[config.kernels]
        size = config.memory
        self.attention = Attention(config.self_attention, size, size, kernels)
        self.attention_norm = LayerNorm(size)
        self.feed_forward = FeedForward(config, size)
        self.feed_forward_norm = LayerNorm(size)
        self.dropout = kernels.Dropout(config.dropout)

    def forward(self, x_BSM: Tensor, length_B: Tensor) -> Tensor:
        normed_BSM = self.attention_norm(x_BSM)
        memory = self.attention.project_memory(normed_BSM, length_B)
        context = AttentionContext(self.attention, memory, torch.zeros_like(length_B), None, x_BSM.dtype)
        x_BSM = x_BSM + self.dropout(context.attend(normed_BSM))
        return x_BSM + self.dropout(self.feed_forward(self.feed_forward_norm(x_BSM)))


class TransformerEncoder(nn.Module):
    """Maps embedded_BSE to outputs_BSM, and their mean over each sentence, from which a decoder starts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input = TransformerInput(config, config.memory)
        self.layers = nn.ModuleList(TransformerEncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = LayerNorm(config.memory)

    def forward(self, embedded_BSE: Tensor, length_B: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return outputs_BSM (0 at padding) and a list of their mean_BM, in place of the last states of an RNN."""
        position_BS = torch.arange(embedded_BSE.shape[1], device=length_B.device).expand(len(length_B), -1)
        x_BSM = self.input(embedded_BSE, position_BS)
        for layer in self.layers:
            x_BSM = layer(x_BSM, length_B)
        outputs_BSM = self.norm(x_BSM) * (position_BS < length_B.unsqueeze(1)).unsqueeze(2)
        return outputs_BSM, [outputs_BSM.sum(1) / length_B.unsqueeze(1).to(outputs_BSM.dtype)]


# ------------------------------------------------------------------------------------------------------------ decoder
class LayerState(NamedTuple):
    """What a decoder layer keeps of the target positions so far."""

    values_NHCD: Tensor
    keys_NHCA: Tensor
    coverage_NS: Tensor | None  # sum of the attention weights of earlier steps, with coverage

    def write(self, values_NHTD: Tensor, keys_NHTA: Tensor, position_NT: Tensor) -> "LayerState":
        """Return a copy with the keys and values of these positions. Without any room, they are the first ones."""
        if not self.keys_NHCA.shape[2]:
            return self._replace(values_NHCD=values_NHTD, keys_NHCA=keys_NHTA)
        index_NHT1 = position_NT[:, None, :, None]
        return self._replace(
            values_NHCD=self.values_NHCD.scatter(2, index_NHT1.expand_as(values_NHTD), values_NHTD),
            keys_NHCA=self.keys_NHCA.scatter(2, index_NHT1.expand_as(keys_NHTA), keys_NHTA),
        )

    def resize(self, room: int) -> "LayerState":
        """Return a copy with room for this many positions."""
        missing = room - self.keys_NHCA.shape[2]
        return self._replace(
            values_NHCD=F.pad(self.values_NHCD, (0, 0, 0, missing)), keys_NHCA=F.pad(self.keys_NHCA, (0, 0, 0, missing))
        )


class TransformerState(NamedTuple):
    """The keys and values of the target positions that each hypothesis has written. Every tensor has N rows."""

    layers: tuple[LayerState, ...]
    position_N: Tensor  # position of the next target token, from 0

    def make_room(self, positions: int) -> "TransformerState":
        """Return a state with room for this many target positions, rounded up.

        The first call of the decoder needs none.
        """
        room = self.layers[0].keys_NHCA.shape[2]
        if room in (0, round_up_room(positions)):
            return self
        return self._replace(layers=tuple(layer.resize(round_up_room(positions)) for layer in self.layers))


class TransformerDecoderLayer(nn.Module):
    """x' = x + SelfAttention(norm(x)), x'' = x' + Attention(norm(x'), source), then x'' + FeedForward(norm(x'')).

    Self-attention sees the positions up to its own. Dropout and normalization are those of the encoder's layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kernels = KERNELS[config.kernels]
        size = config.hidden
        self.self_attention = Attention(config.self_attention, size, size, kernels, is_causal=True)
        self.self_attention_norm = LayerNorm(size)
        self.attention = Attention(config.attention, size, config.memory, kernels)
        self.attention_norm = LayerNorm(size)
        # The context has the size of what is attended to.
        self.context_map: nn.Module = nn.Identity()
        if config.memory != size:
            self.context_map = kernels.Linear(config.memory, size, bias=False)
        self.feed_forward = FeedForward(config, size)
        self.feed_forward_norm = LayerNorm(size)
        self.dropout = kernels.Dropout(config.dropout)

    def start(self, outputs_BSM: Tensor, length_B: Tensor) -> tuple[Memory, LayerState]:
        """Return the memory of the source, and the state before the first target position."""
        memory = self.attention.project_memory(outputs_BSM, length_B)
        nothing_B0D = outputs_BSM.new_zeros(len(outputs_BSM), 0, self.self_attention.context_size)
        values_BHCD, keys_BHCA = self.self_attention.project(nothing_B0D)  # C = 0, and the sizes of the projections
        return memory, LayerState(values_BHCD, keys_BHCA, self.attention.init_state(memory)[1])

    def forward(
        self, x_NTD: Tensor, state: LayerState, position_NT: Tensor, memory: Memory
    ) -> tuple[Tensor, LayerState, Tensor | None]:
        """Return x_NTD, the new state and the weights_NTS of attention to the source."""
        position_N = position_NT[:, 0]
        normed_NTD = self.self_attention_norm(x_NTD)
        state = state.write(*self.self_attention.project(normed_NTD), position_NT)
        room_N = torch.full_like(position_N, state.keys_NHCA.shape[2])
        past = build_memory(state.values_NHCD, state.keys_NHCA, room_N, self.self_attention.max_source_positions)
        past_context = AttentionContext(self.self_attention, past, position_N, None, x_NTD.dtype)
        x_NTD = x_NTD + self.dropout(past_context.attend(normed_NTD))

        context = AttentionContext(self.attention, memory, position_N, state.coverage_NS, x_NTD.dtype)
        x_NTD = x_NTD + self.dropout(self.context_map(context.attend(self.attention_norm(x_NTD))))
        x_NTD = x_NTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_NTD)))
        return x_NTD, state._replace(coverage_NS=context.coverage_NS), context.concat_weights()


class TransformerDecoder(nn.Module):
    """Maps embedded_NTE, state and memory to features_NTD, weights and the new state."""

    has_step_loop = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input = TransformerInput(config, config.hidden)
        layers = [TransformerDecoderLayer(config) for _ in range(config.decoder_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = LayerNorm(config.hidden)
        self.max_source_positions = layers[0].attention.max_source_positions
        self.show_attention(LayerAndHead(config.attention.layer, config.attention.head))

    def show_attention(self, shown: LayerAndHead) -> None:
        """Choose the layer and head whose attention weights are returned. None: their mean."""
        self.shown_layer = shown.layer
        for layer in self.layers:
            assert isinstance(layer, TransformerDecoderLayer)
            layer.attention.show_head(shown.head)

    def start(self, outputs_BSM: Tensor, lasts: list[Tensor], length_B: Tensor) -> tuple[Parts, TransformerState]:
        """Return a memory for each layer, and the initial state with one row per sentence."""
        memories, states = zip(*(layer.start(outputs_BSM, length_B) for layer in self.layers), strict=True)
        return Parts(memories), TransformerState(states, torch.zeros_like(length_B))

    def forward(
        self, embedded_NTE: Tensor, state: TransformerState, memory: Parts, inputs_NTG: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, TransformerState]:
        """Return features_NTD (which predict the token after each input token), weights_NTS and the new state.

        Unless the state is that of `start`, it must have room for the tokens. `inputs_NTG` is for recurrent decoders.
        """
        steps = embedded_NTE.shape[1]
        position_NT = state.position_N.unsqueeze(1) + torch.arange(steps, device=state.position_N.device)
        x_NTD = self.input(embedded_NTE, position_NT)
        layers, weights = [], []
        for layer, layer_state, layer_memory in zip(self.layers, state.layers, memory, strict=True):
            x_NTD, layer_state, layer_weights = layer(x_NTD, layer_state, position_NT, layer_memory)
            layers.append(layer_state)
            weights.append(layer_weights)
        new_state = TransformerState(tuple(layers), state.position_N + steps)
        shown_NTS = torch.stack(weights).mean(0) if self.shown_layer is None else weights[self.shown_layer]
        return self.norm(x_NTD), shown_NTS, new_state
