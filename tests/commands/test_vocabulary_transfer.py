"""init_from= with new_tokenizer=true: a child with a vocabulary of its own."""

from pathlib import Path

import pytest
import torch
from builders import TINY_SETTINGS, make_sentences, make_tokenizer, run_nmt, run_ok, write_corpus
from safetensors.torch import load_file

from nmt.config import TokenizerConfig
from nmt.data.tokenizer import load_tokenizer, train_tokenizer
from nmt.runs.folder import find_last_checkpoint
from nmt.training.vocabulary_transfer import match_pieces, split_into_pieces


def test_pieces_are_matched_by_text() -> None:
    parent = make_tokenizer("bpe").source
    child = train_tokenizer(make_sentences(300), make_sentences(300, seed=2), TokenizerConfig(vocab_size=340)).source
    assert parent.vocab_size < child.vocab_size
    ids = {parent.processor.id_to_piece(number): number for number in range(parent.vocab_size)}
    for number, parts in enumerate(match_pieces(child, parent)):
        piece = child.processor.id_to_piece(number)
        if piece in ids:
            assert parts == [ids[piece]]
        else:
            assert "".join(parent.processor.id_to_piece(part) for part in parts) == piece


def test_longest_parts_and_unknown_characters() -> None:
    vocabulary = {"▁ab": 5, "▁a": 6, "b": 7, "c": 8}
    assert split_into_pieces("▁abcb", vocabulary, 3) == [5, 8, 7]
    assert split_into_pieces("▁a猫b", vocabulary, 3) == [6, 7] and split_into_pieces("猫", vocabulary, 3) == []


@pytest.mark.parametrize("tie", ["none", "three"])
def test_child_with_its_own_vocabulary(tmp_path: Path, tie: str) -> None:
    (tmp_path / "a").mkdir()
    corpus = write_corpus(tmp_path / "a", train=150, valid=6, test=6)
    settings = ("data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_epochs=null", f"model.tie={tie}")
    settings += ("model.embed=32",) if tie == "three" else ("tokenizer.joint=false",)
    run_ok("train", "name=parent", *settings, "train.max_steps=3", folder=tmp_path)
    lines = (corpus / "train.en").read_text("utf-8").splitlines()
    (corpus / "train.en").write_text("".join(f"Zebra {line}\n" for line in lines), "utf-8")
    child_settings = (
        *settings,
        "init_from=runs/parent",
        "new_tokenizer=true",
        "tokenizer.vocab_size=460",
        "train.max_steps=1",
    )
    child = run_nmt("train", "name=child", *child_settings, "optim.lr=1e-12", folder=tmp_path)
    assert child.returncode == 0, child.stderr.decode()
    assert "target vocabulary: 460 pieces, of which " in child.stderr.decode()
    runs = {name: tmp_path / "runs" / name for name in ("parent", "child")}
    tokenizers = {name: load_tokenizer(run).target for name, run in runs.items()}
    weights = {name: load_file(find_last_checkpoint(run) / "model.safetensors") for name, run in runs.items()}
    ids = {name: tokenizer.processor.piece_to_id("▁the") for name, tokenizer in tokenizers.items()}
    rows = [weights[name]["target_embedding.weight"][ids[name]] for name in runs]
    torch.testing.assert_close(*rows, atol=1e-6, rtol=0)
    matches = match_pieces(tokenizers["child"], tokenizers["parent"])
    number, parts = next((number, parts) for number, parts in enumerate(matches) if len(parts) > 1)
    parent_VE, child_VE = (weights[name]["target_embedding.weight"] for name in runs)
    torch.testing.assert_close(child_VE[number], parent_VE[parts].mean(0), atol=1e-6, rtol=0)
    recurrent = next(name for name in weights["parent"] if name.startswith("encoder"))
    torch.testing.assert_close(weights["parent"][recurrent], weights["child"][recurrent], atol=1e-6, rtol=0)
    child_settings = child_settings[:-1]
    run_ok("train", "name=child", *child_settings, "train.max_steps=2", "resume=true", folder=tmp_path)
