"""Every knob of the model: what it is called, what it may be, what it means. No torch here."""

import dataclasses
from dataclasses import dataclass, field

from nmt.errors import UserError, check_at_least, check_choice, check_share

STYLES = ("bahdanau", "luong", "gnmt")
CELLS = ("lstm", "gru")
SCORES = ("additive", "concat", "dot", "scaled_dot", "general", "location", "none")
WINDOWS = ("global", "local_m", "local_p")
NORMALIZERS = ("softmax", "sparsemax", "entmax15")
READOUTS = ("tanh", "maxout")
BRIDGES = ("bridge", "last", "mean", "zero")
TIES = ("none", "two", "three")
MAX_LAYERS = 100  # at most, on either side


@dataclass(slots=True)
class AttentionConfig:
    """Attention = score x window x normalizer; docs/attention.md has the equations."""

    score: str = "additive"  # additive (= concat) | dot | scaled_dot | general | location | none (no attention at all)
    window: str = "global"  # global | local_m (around the same position) | local_p (around a predicted position)
    half_width: int = 10  # D of a local window: it looks at 2 D + 1 source pieces
    normalizer: str = "softmax"  # softmax | sparsemax | entmax15 (these two give many weights of exactly 0)
    heads: int = 1  # each attends on its share of the sizes
    coverage: bool = False  # a score sees how much weight each source piece has had so far
    size: int | None = None  # of the space in which queries and keys meet; null: model.hidden
    max_positions: int = 256  # location: source pieces after these get weight 0

    def __post_init__(self) -> None:
        check_choice("model.attention.score", self.score, SCORES)
        check_choice("model.attention.window", self.window, WINDOWS)
        check_choice("model.attention.normalizer", self.normalizer, NORMALIZERS)
        check_at_least(1, "model.attention.", self, "half_width", "heads", "size", "max_positions")
        if self.score == "none":
            idle = [f for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default]
            given = " ".join(f"model.attention.{f.name}={getattr(self, f.name)}" for f in idle)
            unset = " ".join(f"model.attention.{f.name}={'null' if f.default is None else f.default}" for f in idle)
            if idle:
                raise UserError(
                    f"{given}: nothing attends with model.attention.score=none; leave it out, or write {unset}"
                )


@dataclass(slots=True)
class ModelConfig:
    """A recurrent encoder and a recurrent decoder that attends to it."""

    style: str = "bahdanau"  # attention is before the cell: bahdanau | after it: luong | at the bottom layer: gnmt
    cell: str = "lstm"  # lstm | gru
    embed: int = 256  # size of an embedding
    hidden: int = 512  # of the decoder
    encoder_hidden: int | None = None  # of the encoder, each direction; null: hidden, half of it if bidirectional
    bidirectional: bool = True  # the encoder reads in both directions
    encoder_layers: int = 1  # recurrent layers of the encoder
    decoder_layers: int = 1  # ... of the decoder; gnmt needs 2
    dropout: float = 0.3  # on embeddings, between layers, and before the output layer
    input_feeding: bool = True  # luong: the attentional vector is part of the next step's input
    bridge: str = "bridge"  # initial decoder state: bridge (learned) | last | mean | zero
    readout: str = "tanh"  # what the output layer sees of style bahdanau: tanh | maxout (half of hidden)
    residual: bool = False  # add each upper layer's input to its output (gnmt's decoder: from the third on)
    shortcut: bool = False  # each encoder output has its own piece's embedding added: alignments are learned sooner
    tie: str = "none"  # share embeddings: none | two (target and output layer) | three (source too)
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    def __post_init__(self) -> None:
        check_choice("model.style", self.style, STYLES)
        check_choice("model.cell", self.cell, CELLS)
        check_choice("model.bridge", self.bridge, BRIDGES)
        check_choice("model.readout", self.readout, READOUTS)
        check_choice("model.tie", self.tie, TIES)
        check_at_least(1, "model.", self, "embed", "hidden", "encoder_hidden")
        for name in ("encoder_layers", "decoder_layers"):
            if not 1 <= getattr(self, name) <= MAX_LAYERS:
                raise UserError(f"model.{name}={getattr(self, name)} must be from 1 to {MAX_LAYERS}")
        check_share("model.dropout", self.dropout)
        if self.encoder_hidden is None and self.bidirectional and self.hidden % 2:
            raise UserError(f"model.hidden={self.hidden} must be even for two directions, or set model.encoder_hidden")
        if self.bridge in ("last", "mean") and self.memory != self.hidden:
            raise UserError(
                f"model.bridge={self.bridge} copies the encoder's state ({self.memory}) to the decoder's "
                f"(model.hidden={self.hidden}); make them equal, or write model.bridge=bridge"
            )
        if self.readout == "maxout" and self.style != "bahdanau":
            raise UserError(f"model.readout=maxout is a part of model.style=bahdanau, not of {self.style}")
        if self.style == "gnmt" and self.decoder_layers < 2:
            raise UserError("model.style=gnmt needs model.decoder_layers=2 or more: its upper layers take the context")
        self.check_attention()

    def check_attention(self) -> None:
        """What the sizes of the model must be for its attention, or without any."""
        score, heads = self.attention.score, self.attention.heads
        if score == "none" and self.bridge == "zero":
            raise UserError(
                "model.attention.score=none model.bridge=zero: nothing of the source would reach the decoder; "
                "write model.bridge=bridge"
            )
        compared = score in ("additive", "concat") or heads > 1 and score != "location"
        if self.attention.size is not None and not compared:
            raise UserError(
                f"model.attention.size={self.attention.size} has no meaning for "
                f"model.attention.score={score}; leave it unset"
            )
        if score in ("dot", "scaled_dot") and heads == 1 and self.memory != self.hidden:
            raise UserError(
                f"model.attention.score={score} multiplies the decoder's state (model.hidden={self.hidden}) with the "
                f"encoder's ({self.memory}); make them equal, or use general"
            )
        if self.memory % heads:
            raise UserError(f"model.attention.heads={heads} must divide the size of an encoder output, {self.memory}")
        size = self.attention.size or self.hidden
        if compared and size % heads:
            raise UserError(
                f"model.attention.heads={heads} must divide {size}, which is model.attention.size or else model.hidden"
            )

    @property
    def idle(self) -> list[str]:
        """Settings that were given and mean nothing to this model."""
        given, default = self.attention, AttentionConfig()
        width = given.half_width != default.half_width and given.window == "global"
        first = 2 if self.style == "gnmt" else 1  # layers below those that it is about
        reach = given.max_positions != default.max_positions and given.score != "location"
        return [
            *[f"model.attention.half_width={given.half_width}"] * width,
            *[f"model.attention.max_positions={given.max_positions}"] * reach,
            *["model.residual=true"] * (self.residual and self.encoder_layers == 1 and self.decoder_layers == first),
            *["model.shortcut=true"] * (self.shortcut and given.score == "none"),
            *["model.input_feeding=false"] * (not self.input_feeding and self.style != "luong"),
        ]

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def memory(self) -> int:
        """Size M of an encoder output."""
        return self.directions * (self.encoder_hidden or self.hidden // self.directions)

    @property
    def features(self) -> int:
        """Size of what the output layer sees."""
        return -(-self.hidden // 2) if self.readout == "maxout" else self.hidden
