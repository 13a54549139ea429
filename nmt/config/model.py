"""Settings of the model."""

import dataclasses
from dataclasses import dataclass, field

from nmt.config.fields import setting
from nmt.errors import UserError, check_at_least, check_choice, check_fraction

MODEL_STYLES = ("bahdanau", "luong", "gnmt")
CELL_TYPES = ("lstm", "gru")
ATTENTION_SCORES = ("additive", "concat", "dot", "scaled_dot", "general", "location", "none")
ATTENTION_WINDOWS = ("global", "local_m", "local_p")
ATTENTION_NORMALIZERS = ("softmax", "sparsemax", "entmax15")
READOUT_TYPES = ("tanh", "maxout")
BRIDGE_TYPES = ("bridge", "last", "mean", "zero")
TIE_MODES = ("none", "two", "three")
KERNEL_VERSIONS = ("fast", "reference")
MAX_LAYERS = 100  # of the encoder or the decoder


@dataclass(slots=True)
class AttentionConfig:
    """Attention = score x window x normalizer; docs/attention.md has the equations."""

    score: str = setting("additive", "additive (= concat) | dot | scaled_dot | general | location | none")
    window: str = setting("global", "global | local_m (same position) | local_p (predicted position)")
    half_width: int = setting(10, "local windows: half width w; the window covers 2 w + 1 source pieces")
    normalizer: str = setting("softmax", "softmax | sparsemax | entmax15 (the last two give exact zeros)")
    heads: int = setting(1, "number of attention heads")
    coverage: bool = setting(False, "let the score see the attention that each source piece has received")
    size: int | None = setting(None, "dimension of queries and keys; null: model.hidden")
    max_positions: int = setting(256, "score=location: maximum source positions; later pieces get weight 0")

    def __post_init__(self) -> None:
        check_choice("model.attention.score", self.score, ATTENTION_SCORES)
        check_choice("model.attention.window", self.window, ATTENTION_WINDOWS)
        check_choice("model.attention.normalizer", self.normalizer, ATTENTION_NORMALIZERS)
        check_at_least(1, "model.attention.", self, "half_width", "heads", "size", "max_positions")
        if self.score == "none":
            changed = [item for item in dataclasses.fields(self)[1:] if getattr(self, item.name) != item.default]
            current = " ".join(f"model.attention.{item.name}={getattr(self, item.name)}" for item in changed)
            defaults = " ".join(
                f"model.attention.{item.name}={'null' if item.default is None else item.default}" for item in changed
            )
            if changed:
                raise UserError(
                    f"{current} has no effect with model.attention.score=none; leave it out or write {defaults}"
                )


@dataclass(slots=True)
class ModelConfig:
    """A recurrent encoder and a recurrent decoder with attention."""

    style: str = setting("bahdanau", "bahdanau (attend before the step) | luong (after it) | gnmt (bottom layer)")
    cell: str = setting("lstm", "lstm | gru")
    embed: int = setting(256, "embedding size")
    hidden: int = setting(512, "decoder state size")
    encoder_hidden: int | None = setting(None, "encoder size per direction; null: hidden (/ 2 if bidirectional)")
    bidirectional: bool = setting(True, "bidirectional encoder")
    encoder_layers: int = setting(1, "number of encoder layers")
    decoder_layers: int = setting(1, "number of decoder layers; gnmt needs at least 2")
    dropout: float = setting(0.3, "dropout rate on embeddings, between layers and before the output layer")
    input_feeding: bool = setting(True, "style=luong: feed the attentional vector to the next step")
    bridge: str = setting("bridge", "initial decoder state: bridge (learned) | last | mean | zero")
    readout: str = setting("tanh", "style=bahdanau: features before the output layer: tanh | maxout (half of hidden)")
    residual: bool = setting(False, "residual connections around upper layers (gnmt decoder: from the third layer on)")
    shortcut: bool = setting(False, "add source embeddings to encoder outputs, which makes alignments easier to learn")
    tie: str = setting("none", "share embeddings: none | two (target and output layer) | three (source as well)")
    kernels: str = setting("fast", "fast | reference (slow, plain PyTorch for reading and debugging)")
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    def __post_init__(self) -> None:
        check_choice("model.style", self.style, MODEL_STYLES)
        check_choice("model.cell", self.cell, CELL_TYPES)
        check_choice("model.bridge", self.bridge, BRIDGE_TYPES)
        check_choice("model.readout", self.readout, READOUT_TYPES)
        check_choice("model.tie", self.tie, TIE_MODES)
        check_choice("model.kernels", self.kernels, KERNEL_VERSIONS)
        check_at_least(1, "model.", self, "embed", "hidden", "encoder_hidden")
        for name in ("encoder_layers", "decoder_layers"):
            if not 1 <= getattr(self, name) <= MAX_LAYERS:
                raise UserError(f"model.{name}={getattr(self, name)} must be from 1 to {MAX_LAYERS}")
        check_fraction("model.dropout", self.dropout)
        if self.encoder_hidden is None and self.bidirectional and self.hidden % 2:
            raise UserError(
                f"model.hidden={self.hidden} must be even for a bidirectional encoder; or set model.encoder_hidden"
            )
        if self.bridge in ("last", "mean") and self.memory != self.hidden:
            raise UserError(
                f"model.bridge={self.bridge} copies the encoder's state ({self.memory}) to the decoder's "
                f"(model.hidden={self.hidden}); make them equal or write model.bridge=bridge"
            )
        if self.readout == "maxout" and self.style != "bahdanau":
            raise UserError(f"model.readout=maxout needs model.style=bahdanau, not {self.style}")
        if self.style == "gnmt" and self.decoder_layers < 2:
            raise UserError(
                "model.style=gnmt needs model.decoder_layers=2 or more, because its upper layers receive the context"
            )
        self.check_attention()

    def check_attention(self) -> None:
        """Raise a `UserError` if settings of attention contradict each other or the sizes of the model."""
        score, heads = self.attention.score, self.attention.heads
        if score == "none" and self.bridge == "zero":
            raise UserError(
                "with model.attention.score=none model.bridge=zero the decoder would not see the source; "
                "write model.bridge=bridge"
            )
        has_projections = score in ("additive", "concat") or heads > 1 and score != "location"
        if self.attention.size is not None and not has_projections:
            raise UserError(
                f"model.attention.size={self.attention.size} has no effect with model.attention.score={score}; "
                "leave it out"
            )
        if score in ("dot", "scaled_dot") and heads == 1 and self.memory != self.hidden:
            raise UserError(
                f"model.attention.score={score} multiplies decoder states (size model.hidden={self.hidden}) by encoder "
                f"outputs (size {self.memory}); make the sizes equal or use general"
            )
        if self.memory % heads:
            raise UserError(f"model.attention.heads={heads} must divide the size of an encoder output, {self.memory}")
        size = self.attention.size or self.hidden
        if has_projections and size % heads:
            raise UserError(
                f"model.attention.heads={heads} must divide {size}, which is model.attention.size or else model.hidden"
            )

    @property
    def unused_settings(self) -> list[str]:
        """Settings with a non-default value that have no effect on this model, as `key=value`."""
        attention, default = self.attention, AttentionConfig()
        unused = []
        if attention.half_width != default.half_width and attention.window == "global":
            unused.append(f"model.attention.half_width={attention.half_width}")
        if attention.max_positions != default.max_positions and attention.score != "location":
            unused.append(f"model.attention.max_positions={attention.max_positions}")
        plain_decoder_layers = 2 if self.style == "gnmt" else 1  # layers that never get a residual connection
        if self.residual and self.encoder_layers == 1 and self.decoder_layers == plain_decoder_layers:
            unused.append("model.residual=true")
        if self.shortcut and attention.score == "none":
            unused.append("model.shortcut=true")
        if not self.input_feeding and self.style != "luong":
            unused.append("model.input_feeding=false")
        return unused

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def memory(self) -> int:
        """Size M of an encoder output."""
        return self.directions * (self.encoder_hidden or self.hidden // self.directions)

    @property
    def features(self) -> int:
        """Size of the input of the output layer."""
        return -(-self.hidden // 2) if self.readout == "maxout" else self.hidden
