"""Settings of the model."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from nmt.config.fields import setting
from nmt.errors import UserError, check_at_least, check_choice, check_fraction

MODEL_STYLES = ("bahdanau", "luong", "gnmt", "transformer")
ENCODER_TYPES = ("rnn", "transformer")
CELL_TYPES = ("lstm", "gru")
ATTENTION_SCORES = ("additive", "concat", "dot", "scaled_dot", "general", "location", "none")
ATTENTION_WINDOWS = ("global", "local_m", "local_p")
ATTENTION_NORMALIZERS = ("softmax", "sparsemax", "entmax15")
READOUT_TYPES = ("tanh", "maxout")
BRIDGE_TYPES = ("learned", "last", "mean", "zero")
TIE_MODES = ("none", "two", "three")
KERNEL_VERSIONS = ("fast", "reference")
MAX_LAYERS = 100  # of the encoder or the decoder


class LayerAndHead(NamedTuple):
    """Whose attention weights are shown: those of a decoder layer and a head, from 0. None: their mean."""

    layer: int | None
    head: int | None


@dataclass(slots=True)
class AttentionConfig:
    """Attention = score x window x normalizer; docs/models.md has the equations."""

    score: str = setting("additive", "additive (= concat) | dot | scaled_dot | general | location | none")
    window: str = setting("global", "global | local_m (same position) | local_p (predicted position)")
    half_width: int = setting(10, "local windows: half width w; the window covers 2 w + 1 source pieces")
    normalizer: str = setting("softmax", "softmax | sparsemax | entmax15 (the last two give exact zeros)")
    heads: int = setting(1, "number of attention heads")
    coverage: bool = setting(False, "let the score see the attention that each source piece has received")
    layer: int | None = setting(None, "style=transformer: decoder layer whose weights are shown, from 0; null: mean")
    head: int | None = setting(None, "head whose weights are shown and guided, from 0; null: mean")

    section: ClassVar[str] = "model.attention."

    def __post_init__(self) -> None:
        check_choice(f"{self.section}score", self.score, ATTENTION_SCORES)
        check_choice(f"{self.section}window", self.window, ATTENTION_WINDOWS)
        check_choice(f"{self.section}normalizer", self.normalizer, ATTENTION_NORMALIZERS)
        check_at_least(1, self.section, self, "half_width", "heads")
        check_at_least(0, self.section, self, "layer", "head")
        if self.head is not None and self.head >= self.heads:
            raise UserError(f"{self.section}head={self.head} must be below {self.section}heads={self.heads}")

    @property
    def has_projections(self) -> bool:
        """Whether a dot product compares linear maps of queries and keys, and values are mapped too."""
        return self.heads > 1

    def check_sizes(self, query_size: int, memory_size: int) -> None:
        """Raise a `UserError` if the number of heads does not divide the sizes."""
        if memory_size % self.heads:
            raise UserError(
                f"{self.section}heads={self.heads} must evenly divide {memory_size}, the size of the vectors attended "
                "to; change model.hidden, or model.encoder_hidden for the source"
            )
        compares = self.score in ("additive", "concat") or self.has_projections and self.score != "location"
        if compares and query_size % self.heads:
            raise UserError(f"{self.section}heads={self.heads} must evenly divide {query_size}, which is model.hidden")


@dataclass(slots=True)
class SelfAttentionConfig(AttentionConfig):
    """Attention of a Transformer layer to the positions of its own sequence; other keys as in `AttentionConfig`."""

    score: str = setting("scaled_dot", "additive (= concat) | dot | scaled_dot | general | location")
    heads: int = setting(4, "number of attention heads")

    section: ClassVar[str] = "model.self_attention."

    def __post_init__(self) -> None:
        if self.score == "none":
            raise UserError(
                "model.self_attention.score=none: a Transformer layer needs a score; use "
                "model.self_attention.score=scaled_dot"
            )
        AttentionConfig.__post_init__(self)
        if self.coverage or self.layer is not None or self.head is not None:
            raise UserError(
                "coverage, layer and head are keys of model.attention; remove them from model.self_attention"
            )

    @property
    def has_projections(self) -> bool:
        """Always true: queries, keys and values are maps of the same vectors."""
        return True


@dataclass(slots=True)
class ModelConfig:
    """An encoder, and a decoder with attention."""

    encoder: str = setting("rnn", "rnn | transformer (self-attention)")
    style: str = setting(
        "bahdanau", "bahdanau (attend before the step) | luong (after it) | gnmt (bottom layer) | transformer"
    )
    cell: str = setting("lstm", "lstm | gru")
    embed: int = setting(256, "embedding size")
    hidden: int = setting(512, "decoder state size")
    encoder_hidden: int | None = setting(None, "encoder size per direction; null: hidden (/ 2 if bidirectional)")
    bidirectional: bool = setting(True, "encoder=rnn: bidirectional encoder")
    encoder_layers: int = setting(1, "number of encoder layers")
    decoder_layers: int = setting(1, "number of decoder layers; gnmt needs at least 2")
    dropout: float = setting(0.3, "dropout rate on embeddings, between layers and before the output layer")
    input_feeding: bool = setting(True, "style=luong: feed the attentional vector to the next step")
    bridge: str = setting("learned", "initial decoder state: learned | last | mean | zero")
    readout: str = setting("tanh", "style=bahdanau: features before the output layer: tanh | maxout (half of hidden)")
    residual: bool = setting(False, "residual connections around upper layers (gnmt decoder: from the third layer on)")
    shortcut: bool = setting(
        False, "encoder=rnn: add source embeddings to encoder outputs, which makes alignments easier to learn"
    )
    tie: str = setting("none", "share embeddings: none | two (target and output layer) | three (source as well)")
    kernels: str = setting("fast", "fast | reference (slow, plain PyTorch for reading and debugging)")
    feed_forward: int | None = setting(None, "Transformer layers: size of the feed-forward part; null: 4 times hidden")
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    self_attention: SelfAttentionConfig = field(default_factory=SelfAttentionConfig)

    def __post_init__(self) -> None:
        check_choice("model.encoder", self.encoder, ENCODER_TYPES)
        check_choice("model.style", self.style, MODEL_STYLES)
        check_choice("model.cell", self.cell, CELL_TYPES)
        check_choice("model.bridge", self.bridge, BRIDGE_TYPES)
        check_choice("model.readout", self.readout, READOUT_TYPES)
        check_choice("model.tie", self.tie, TIE_MODES)
        check_choice("model.kernels", self.kernels, KERNEL_VERSIONS)
        check_at_least(1, "model.", self, "embed", "hidden", "encoder_hidden", "feed_forward")
        for name in ("encoder_layers", "decoder_layers"):
            if not 1 <= getattr(self, name) <= MAX_LAYERS:
                raise UserError(f"model.{name}={getattr(self, name)} must be from 1 to {MAX_LAYERS}")
        check_fraction("model.dropout", self.dropout)
        if self.encoder == "rnn" and self.encoder_hidden is None and self.bidirectional and self.hidden % 2:
            raise UserError(
                f"model.hidden={self.hidden} must be even for a bidirectional encoder; or set model.encoder_hidden"
            )
        if self.style != "transformer" and self.bridge in ("last", "mean") and self.memory != self.hidden:
            raise UserError(
                f"model.bridge={self.bridge} copies the encoder's state ({self.memory}) to the decoder's "
                f"(model.hidden={self.hidden}); make them equal or use model.bridge=learned"
            )
        if self.readout == "maxout" and self.style != "bahdanau":
            raise UserError(f"model.readout=maxout needs model.style=bahdanau, not {self.style}")
        if self.style == "transformer" and self.attention.score == "none":
            raise UserError(
                "model.style=transformer needs attention to the source; use model.attention.score=scaled_dot"
            )
        if (layer := self.attention.layer) is not None:
            if self.style != "transformer":
                raise UserError(f"model.attention.layer={layer} needs model.style=transformer, not {self.style}")
            if layer >= self.decoder_layers:
                raise UserError(
                    f"model.attention.layer={layer} must be below model.decoder_layers={self.decoder_layers}"
                )
        if self.style == "gnmt" and self.decoder_layers < 2:
            raise UserError(
                "model.style=gnmt needs model.decoder_layers=2 or more, because its upper layers receive the context"
            )
        self.check_attention()

    def check_attention(self) -> None:
        """Raise a `UserError` if settings of attention contradict each other or the sizes of the model."""
        score = self.attention.score
        if score == "none" and self.bridge == "zero":
            raise UserError(
                "with model.attention.score=none model.bridge=zero the decoder would not see the source; "
                "use model.bridge=learned"
            )
        self.attention.check_sizes(self.hidden, self.memory)
        if score in ("dot", "scaled_dot") and not self.attention.has_projections and self.memory != self.hidden:
            raise UserError(
                f"model.attention.score={score} multiplies decoder states (size model.hidden={self.hidden}) by encoder "
                f"outputs (size {self.memory}); make the sizes equal or use general"
            )
        if self.encoder == "transformer":
            self.self_attention.check_sizes(self.memory, self.memory)
        if self.style == "transformer":
            self.self_attention.check_sizes(self.hidden, self.hidden)

    @property
    def layers_and_heads(self) -> list[LayerAndHead]:
        """All that can be shown of attention to the source: the mean, each layer, and each head of each layer.

        With coverage it is only what is configured, because the score sees the weights that are shown.
        """
        if self.attention.coverage:
            return [LayerAndHead(self.attention.layer, self.attention.head)]
        layers = range(self.decoder_layers) if self.style == "transformer" and self.decoder_layers > 1 else [None]
        heads = [None, *range(self.attention.heads)] if self.attention.heads > 1 else [None]
        each = [LayerAndHead(layer, head) for layer in layers for head in heads]
        mean = LayerAndHead(None, None)
        return each if mean in each else [mean, *each]

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def memory(self) -> int:
        """Size M of an encoder output."""
        if self.encoder == "transformer":
            return self.encoder_hidden or self.hidden
        return self.directions * (self.encoder_hidden or self.hidden // self.directions)

    @property
    def features(self) -> int:
        """Size of the input of the output layer."""
        return -(-self.hidden // 2) if self.readout == "maxout" else self.hidden
