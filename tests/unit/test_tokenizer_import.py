"""SentencePiece models of other programs."""

import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from builders import make_sentences

from nmt.config import BOS, EOS, PAD, UNK, TokenizerConfig
from nmt.data.tokenizer import load_tokenizer, train_tokenizer
from nmt.data.tokenizer_import import import_tokenizer
from nmt.errors import UserError

IDS: dict[str, dict[str, Any]] = {
    "SentencePiece": {},
    "fairseq": {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3},
    "Marian": {"bos_id": -1, "eos_id": 0, "unk_id": 1},
    "own": {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3},
}


@lru_cache
def train(model_type: str = "bpe", ids: str = "SentencePiece", symbols: str = "", **settings: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_sentences(300)),
        model_writer=model,
        model_type=model_type,
        **{"vocab_size": 300, "byte_fallback": True} | settings,
        user_defined_symbols=symbols.split(),
        minloglevel=2,
        **IDS[ids],
    )
    return model.getvalue()


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_text_is_divided_into_the_same_pieces(tmp_path: Path, model_type: str, ids: str, normalization: str) -> None:
    data = train(model_type, ids, "<ent> @@", normalization_rule_name=normalization)
    path = tmp_path / "other.model"
    path.write_bytes(data)
    other = sentencepiece.SentencePieceProcessor(model_proto=data)
    side = import_tokenizer(str(path), ["▁<bt>", "\U000f0000"]).source
    assert [side.processor.pad_id(), side.processor.unk_id(), side.processor.bos_id(), side.processor.eos_id()] == [
        PAD,
        UNK,
        BOS,
        EOS,
    ]
    assert list(side.symbols) == ["<ent>", "@@", "▁<bt>", "\U000f0000"] and len(side.literal_ids) == 1
    text = " ".join(other.id_to_piece(i).replace("▁", " ") for i in range(len(other)) if not other.is_control(i))
    for line in [*make_sentences(20), "Ünbekannt 犬 <ent>x@@y  zwei", "<s> </s> <pad> <unk> <0x41>", "", " ", text]:
        ids_of_line = side.encode([line])[0]
        assert side.pieces(ids_of_line) == other.encode(line, out_type=str)
        assert side.decode(ids_of_line) == other.decode(other.encode(line))
    import_tokenizer(str(path), []).save(tmp_path)
    assert load_tokenizer(tmp_path).source.vocab_size == side.vocab_size - 2


def test_tokenizer_of_a_run_stays_the_same(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(make_sentences(200), make_sentences(200), TokenizerConfig(vocab_size=300, literals=2))
    tokenizer.save(tmp_path)
    side, expected = import_tokenizer(str(tmp_path / "tokenizer.model"), ["\U000f0001"]).source, tokenizer.source
    assert side.pieces(range(side.vocab_size)) == expected.pieces(range(expected.vocab_size))
    assert side.encode(make_sentences(20)) == expected.encode(make_sentences(20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"byte_fallback": False, "vocab_size": 60}, "has no pieces for bytes.*train it with byte_fallback=true"),
        ({"model_type": "char"}, "is a model of words or characters; use a BPE or unigram one"),
    ],
)
def test_unsuitable_models_raise(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    path = tmp_path / "other.model"
    path.write_bytes(train(**settings))
    with pytest.raises(UserError, match=message):
        import_tokenizer(str(path), [])


def test_unreadable_files_raise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer.path=none.model cannot be read: No such file"):
        import_tokenizer("none.model", [])
    for data in (b"", b"text", train()[:-40], b"\xff" * 20):
        (tmp_path / "bad.model").write_bytes(data)
        with pytest.raises(UserError, match="is not a SentencePiece model"):
            import_tokenizer(str(tmp_path / "bad.model"), [])
