"""Settings of the model."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from nmt.config.fields import setting
from nmt.errors import UserError, check_at_least, check_choices, check_fraction

ATTENTION_SCORES = ("additive", "concat", "dot", "scaled_dot", "general", "location", "none")
ATTENTION_WINDOWS = ("global", "local_m", "local_p")
ATTENTION_NORMALIZERS = ("softmax", "sparsemax", "entmax15")
BRIDGE_TYPES = ("learned", "last", "mean", "zero")
TIE_MODES = ("none", "two", "three")


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
        scores, windows, normalizers = ATTENTION_SCORES, ATTENTION_WINDOWS, ATTENTION_NORMALIZERS
        check_choices(self.section, self, score=scores, window=windows, normalizer=normalizers)
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
        heads = f"{self.section}heads={self.heads}"
        if memory_size % self.heads:
            raise UserError(f"{heads} must evenly divide {memory_size}; change model.hidden or model.encoder_hidden")
        compares = self.score in ("additive", "concat") or self.has_projections and self.score != "location"
        if compares and query_size % self.heads:
            raise UserError(f"{heads} must evenly divide {query_size}, which is model.hidden")


@dataclass(slots=True)
class SelfAttentionConfig(AttentionConfig):
    """Attention of a Transformer layer to the positions of its own sequence; other keys as in `AttentionConfig`."""

    score: str = setting("scaled_dot", "additive (= concat) | dot | scaled_dot | general | location")
    heads: int = setting(4, "number of attention heads")

    section: ClassVar[str] = "model.self_attention."

    def __post_init__(self) -> None:
        AttentionConfig.__post_init__(self)
        if self.score == "none":
            raise UserError("model.self_attention.score=none: a Transformer layer needs a score, such as scaled_dot")
        if self.coverage or self.layer is not None or self.head is not None:
            raise UserError("model.self_attention: remove coverage, layer and head, which are keys of model.attention")

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
        styles, cells, readouts = ("bahdanau", "luong", "gnmt", "transformer"), ("lstm", "gru"), ("tanh", "maxout")
        check_choices("model.", self, encoder=("rnn", "transformer"), style=styles, cell=cells, readout=readouts)
        check_choices("model.", self, bridge=BRIDGE_TYPES, tie=TIE_MODES, kernels=("fast", "reference"))
        check_at_least(1, "model.", self, "embed", "hidden", "encoder_hidden", "feed_forward")
        check_fraction("model.", self, "dropout")
        for key in ("encoder_layers", "decoder_layers"):
            if not 1 <= getattr(self, key) <= 100:
                raise UserError(f"model.{key}={getattr(self, key)} must be from 1 to 100")
        if self.style == "gnmt" and self.decoder_layers < 2:
            raise UserError("model.style=gnmt needs model.decoder_layers=2 or more: upper layers receive the context")
        if self.readout == "maxout" and self.style != "bahdanau":
            raise UserError(f"model.readout=maxout needs model.style=bahdanau, not {self.style}")
        if self.encoder == "rnn" and self.encoder_hidden is None and self.bidirectional and self.hidden % 2:
            raise UserError(f"model.hidden={self.hidden} must be even for both directions; or set model.encoder_hidden")
        sizes = f"{self.memory}, the encoder's size, must equal model.hidden={self.hidden}"
        if self.style != "transformer" and self.bridge in ("last", "mean") and self.memory != self.hidden:
            raise UserError(f"model.bridge={self.bridge}: {sizes}; change one or use model.bridge=learned")
        self.check_attention(sizes)

    def check_attention(self, sizes: str) -> None:
        """Raise a `UserError` if settings of attention contradict each other or the sizes of the model."""
        score, layer = self.attention.score, self.attention.layer
        if score == "none" and (self.style == "transformer" or self.bridge == "zero"):
            key = f"model.style={self.style}" if self.style == "transformer" else "model.bridge=zero"
            raise UserError(f"with {key} model.attention.score=none the decoder would not see the source; change one")
        if score in ("dot", "scaled_dot") and not self.attention.has_projections and self.memory != self.hidden:
            raise UserError(f"model.attention.score={score}: {sizes}; change one or use model.attention.score=general")
        if layer is not None and (self.style != "transformer" or layer >= self.decoder_layers):
            layers = f"model.decoder_layers={self.decoder_layers}"
            raise UserError(f"model.attention.layer={layer} must be below {layers} of model.style=transformer")
        self.attention.check_sizes(self.hidden, self.memory)
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
