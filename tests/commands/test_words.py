"""Word segmentation of scripts without spaces, BLEU's tokenizer by script, and all commands on such text."""

import json
import math
import random
from pathlib import Path

import pytest
from builders import run_error, run_ok
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import TokenizerConfig
from nmt.data import words as words_module
from nmt.data.tokenizer import group_by_spaces, group_by_words, train_tokenizer
from nmt.data.words import (
    FORMAT_CHARACTERS,
    detect_script,
    find_words_without_space,
    join_sentences,
    segment_words,
    segmenter_name,
    split_tokens,
    split_words,
)
from nmt.errors import UserError
from nmt.evaluation.metrics import (
    bleu,
    choose_bleu_tokenizer,
    compute_scores,
    find_tokenizer_problem,
)

JAPANESE = "char" if find_tokenizer_problem("ja-mecab") else "ja-mecab"

# For each language a sentence pattern with {n} noun, {v} verb, {k} number and {o} object, and words for n, v and o.
LANGUAGES = {
    "en": ("The {n} {v} {k} {o} today.", "dog cat bird teacher", "sees buys likes", "books boats houses"),
    "zh": ("{n}今天{v}{k}本{o}。", "狗 猫 鸟 老师", "看见 买 喜欢", "书 船 房子"),
    "ja": ("{n}は今日{k}つの{o}を{v}。", "犬 猫 鳥 先生", "見ます 買います 好みます", "本 船 家"),
    "ar": ("{v} {n} {k} {o} اليوم.", "الكلب القط الطائر المعلم", "يرى يشتري يحب", "كتب سفن بيوت"),
}
UNSPACED = ("zh", "ja")


def make_sentence(language: str, numbers: tuple[int, int, int, int]) -> str:
    """Make a sentence from the indices of noun and verb, a number, and the index of the object."""
    pattern, nouns, verbs, objects = LANGUAGES[language]
    n, v, k, o = numbers
    return pattern.format(n=nouns.split()[n], v=verbs.split()[v], k=k, o=objects.split()[o])


def write_language(folder: Path, language: str) -> Path:
    """Write {train,valid,test}.{en,language}."""
    numbers = [(n, v, k, o) for n in range(4) for v in range(3) for k in range(2, 10) for o in range(3)]
    random.Random(1).shuffle(numbers)
    splits = {"train": numbers[:248] * 2, "valid": numbers[248:268], "test": numbers[268:]}
    for split, part in splits.items():
        for side in ("en", language):
            text = "".join(make_sentence(side, indices) + "\n" for indices in part)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8")
    return folder


# ----------------------------------------------------------------------------------------------------- words of a text
@pytest.fixture
def no_segmenter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the segmenter, as if the extra `cjk` were not installed."""
    monkeypatch.setattr(words_module, "get_word_breaker", lambda: None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("狗今天看见3本红书。", "狗 今 天 看 见 3 本 红 书 。"),
        ("我用 iPhone15 和Python3.12写C++程序！", "我 用 iPhone15 和 Python3.12 写 C++ 程 序 ！"),
        ("コーヒーを2.5杯", "コ ー ヒ ー を 2.5 杯"),
        ("รักไทย ๑๒๓ คน", "รั ก ไ ท ย ๑๒๓ ค น"),
        ("ខ្មែរ", "ខ្មែ រ"),
        ("བོད་སྐད་ཡིན།", "བོད་ སྐད་ ཡིན །"),  # syllables
        ("狗\u200b看", "狗\u200b 看"),
        ("我 爱 北京 天安门 。", "我 爱 北京 天安门 。"),  # it has spaces between its words already
        ("我喜欢你 你好吗朋友", "我 喜 欢 你 你 好 吗 朋 友"),
        ("대한민국(大韓民國)은 좋다.", "대한민국(大韓民國)은 좋다."),  # Korean has spaces
        ("El  niño,\tdon't (3.5%) 50\xa0km", "El niño, don't (3.5%) 50 km"),
        ("", ""),
    ],
)
def test_segment_words_by_characters_without_segmenter(line: str, expected: str, no_segmenter: None) -> None:
    assert segment_words(line) == expected.split(" ") * bool(expected)
    assert segmenter_name() == "characters"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("狗今天看见3本红书。", "狗 今天 看见 3 本 红 书 。"),
        ("我用 iPhone15 和Python3.12写C++程序！", "我 用 iPhone15 和 Python3.12 写 C++ 程序 ！"),
        ("私は学生です。", "私 は 学生 です 。"),
        ("ฉันรักภาษาไทย มาก", "ฉัน รัก ภาษา ไทย มาก"),
        ("བོད་སྐད་ཡིན།", "བོད་ སྐད་ ཡིན །"),
        ("대한민국(大韓民國)은 좋다.", "대한민국(大韓民國)은 좋다."),
    ],
)
def test_segment_words_by_icu(line: str, expected: str) -> None:
    pytest.importorskip("icu4py")
    assert segment_words(line) == expected.split(" ")
    assert segmenter_name().startswith("icu-")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("می\u200cخواهم به خانه\u200cام بروم.", "می\u200cخواهم به خانه\u200cام بروم ."),  # Persian joiners
        ("\u202bسلام\u202c، دنیا\u200f!", "\u202bسلام\u202c ، دنیا\u200f !"),
        ("\u200f«كتاب»\u200f.", "\u200f« كتاب »\u200f ."),
        ("co\u00adop (\u200eabc\u200e)", "co\u00adop (\u200e abc\u200e )"),
        ("狗\u200b看\u200f。好\u200e", "狗\u200b 看\u200f 。 好\u200e"),
        ("\u200f狗看", "\u200f狗 看"),
        ("“\u200f你好”\u200f ok", "“\u200f 你 好 ”\u200f ok"),
        ("#tag, $3.5 (--help) C++ 100% U.S. and/or l'homme", "#tag , $3.5 ( --help ) C++ 100% U.S . and/or l'homme"),
        ("-----Hello", "- - - - - Hello"),  # a line, not an option
    ],
)
def test_split_tokens_keeps_invisible_characters_with_their_words(line: str, expected: str, no_segmenter: None) -> None:
    assert split_tokens(line) == expected.split(" ")


@given(st.text(st.characters() | st.sampled_from("\u200c\u200f\u202b\u00ad狗ت.-")))
def test_split_tokens_leaves_nothing_out(line: str) -> None:
    words = split_tokens(line)
    assert "".join(words) == "".join(line.split())
    alone = {word for word in words if FORMAT_CHARACTERS.fullmatch(word)}
    assert alone <= set(line.split())  # only what stands between spaces


@given(st.lists(st.text(min_size=1).filter(lambda text: " " not in text)))
def test_split_words_round_trip(parts: list[str]) -> None:
    words = split_words(parts)
    assert ["".join(part) for part in words] == parts and all(all(part) for part in words)


# ----------------------------------------------------------------------------------------------------- words of pieces
def test_group_by_words_assigns_pieces_to_word_of_their_start(no_segmenter: None) -> None:
    assert group_by_words(["▁", "狗", "看见", "3.5", "本", "。", "▁ok", "</s>"]) == (
        ["狗", "看见", "3.5", "本", "。", "ok"],
        [0, 0, 1, 2, 3, 4, 5, -1],
    )
    byte_pieces = [f"<0x{byte:02X}>" for byte in "狗看".encode()]
    assert group_by_words(["▁", *byte_pieces]) == (["狗", "看"], [0, 0, 0, 0, 1, 1, 1])
    assert group_by_words(["▁狗", "<0xE7>", "看"]) == (["狗", "\ufffd", "看"], [0, 1, 2])  # a byte that is not UTF-8
    assert group_by_words(["▁狗看 见", "猫"]) == group_by_spaces(["▁狗看 见", "猫"])  # a space within a piece
    assert group_by_words(["▁Ein", "▁Hu", "nd", "</s>"]) == group_by_spaces(["▁Ein", "▁Hu", "nd", "</s>"])


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
def test_encode_words_keeps_word_boundaries(kind: str, normalization: str) -> None:
    lines = [f"狗今天看见{n}本红书。" for n in range(300)] + [f"猫买{n}只鸟。" for n in range(300)]
    config = TokenizerConfig(type=kind, vocab_size=310, normalization=normalization)
    side = train_tokenizer(lines, lines, config).source
    words = ["狗", "今天", "看见", "鯨", "3", "本"]
    [ids], [indices] = side.encode_words([[["猫"], words, ["ok"]]])
    texts = [side.decode([i for i, index in zip(ids, indices, strict=True) if index == n]) for n in range(8)]
    assert texts == ["猫", *words, "ok"] and indices == sorted(indices)
    assert side.decode(ids) == " ".join(["猫", "".join(words), "ok"])


def test_join_sentences_adds_space_only_between_spaced_scripts() -> None:
    assert join_sentences(["狗看见书。", "", "猫买船。"]) == "狗看见书。猫买船。"
    assert join_sentences(["A dog.", "", "A cat."]) == "A dog. A cat." and join_sentences([]) == ""
    assert join_sentences(["วันนี้", "แมว"]) == "วันนี้ แมว"


def test_find_words_without_space() -> None:
    assert find_words_without_space("狗看见3本书。 ok", ["狗", "看见", "3", "本", "书", "。", "ok"]) == [1, 2, 3, 4, 5]
    assert find_words_without_space("a a  b", ["a", "a", "b"]) == find_words_without_space("x", ["<unk>", "y"]) == []


# ---------------------------------------------------------------------------------------------------- BLEU's tokenizer
@pytest.mark.parametrize(
    ("references", "script", "tokenizer"),
    [
        (["狗看见书。", "猫买船。"], "han", "zh"),
        (["我用TensorFlow和PyTorch", "OK"], "han", "zh"),
        (["私は学生です。", "コンピューター"], "kana", JAPANESE),
        (["我爱这家の店", "她很喜欢那个地方，因为风景很美。"], "han", "zh"),
        (["나는 학교에 간다.", "대한민국(大韓民國)"], None, "13a"),
        (["ฉันรักภาษาไทย"], "other", "char"),
        (["الكلب يرى الكتاب.", "שלום עולם"], None, "13a"),
        (["The word 你好 means hello.", "A line of English."], None, "13a"),
        ([], None, "13a"),
    ],
)
def test_choose_tokenizer_by_script(references: list[str], script: str | None, tokenizer: str) -> None:
    assert detect_script(references) == script and choose_bleu_tokenizer("auto", references) == tokenizer
    if references:
        assert f"tok:{tokenizer}" in compute_scores(references, references)["signatures"]["bleu"]


def test_choose_tokenizer_rejects_uninstalled_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**settings: object) -> None:
        raise RuntimeError

    find_tokenizer_problem.cache_clear()
    monkeypatch.setattr("nmt.evaluation.metrics.BLEU", fail)
    with pytest.raises(UserError, match=r"bleu_tokenizer=ko-mecab needs MeCab.*nmt\[cjk\]"):
        choose_bleu_tokenizer("ko-mecab", [])
    with pytest.raises(UserError, match="bleu_tokenizer=flores200 needs a model that sacreBLEU downloads"):
        choose_bleu_tokenizer("flores200", [])
    assert choose_bleu_tokenizer("auto", ["私は学生です。"]) == "char"
    find_tokenizer_problem.cache_clear()


# -------------------------------------------------------------------------------------------------------- all commands
SETTINGS = (
    "tokenizer.vocab_size=320",
    "tokenizer.joint=false",
    "model=luong",
    "model.input_feeding=false",  # as in TINY_SETTINGS
    "model.embed=32",
    "model.hidden=48",
    "model.dropout=0",
    "model.shortcut=true",
    "optim.lr=0.01",
    "optim.schedule=cosine",
    "train.batch_tokens=400",
    "train.max_steps=240",
    "train.validate_every=60",
    "train.log_every=80",
    "train.monitor=bleu",
)


@pytest.mark.slow
@pytest.mark.parametrize(("language", "tokenizer"), [("zh", "zh"), ("ja", JAPANESE), ("ar", "13a")])
def test_commands_with_unspaced_and_other_scripts(language: str, tokenizer: str, tmp_path: Path) -> None:
    write_language(tmp_path, language)
    data = ("data=text", f"data.path={tmp_path}", "data.source=en", f"data.target={language}")
    run_ok("train", "name=run", *data, *SETTINGS, folder=tmp_path)
    run = tmp_path / "runs/run"
    assert f"bleu_tokenizer: {tokenizer}\n" in (run / "config.yaml").read_text().replace("'", "")
    assert (
        f"BLEU uses sacreBLEU's tokenizer {tokenizer} (chosen by the writing system" in (run / "train.log").read_text()
    )
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = {event["step"]: event for event in events if event["event"] == "validate"}
    best = int((run / "checkpoints/best").read_text().strip().removeprefix("step_"))
    assert validations[best]["bleu"] == max(event["bleu"] for event in validations.values())
    assert validations[best]["loss"] < math.log(320) / 2  # half of what a model has that has not learned anything

    printed = run_ok("evaluate", "checkpoint=runs/run", folder=tmp_path)
    metrics = json.loads((run / "eval/test/metrics.json").read_text())
    assert metrics["bleu_tokenizer"] == tokenizer and f"tok:{tokenizer}" in printed
    references = (tmp_path / f"test.{language}").read_text().splitlines()
    translations = (run / "eval/test/translations.txt").read_text().splitlines()
    assert bleu(translations, references) == pytest.approx(metrics["bleu"])
    records = [json.loads(line) for line in (run / "eval/test/alignments.jsonl").read_text().splitlines()]
    for record, line in zip(records, translations, strict=True):
        words = record["target_words"]
        assert len(words) > 1 and ("".join(words) == line if language in UNSPACED else words == line.split())

    files = ("source=test.en", f"target=test.{language}")
    run_ok("align", "checkpoint=runs/run", *files, "output=links.jsonl", folder=tmp_path)
    aligned = [json.loads(line) for line in (tmp_path / "links.jsonl").read_text().splitlines()]
    assert [record["target_words"] for record in aligned] == [segment_words(line) for line in references]
    assert all(len(set(record["target_word_of_piece"]) - {-1}) == len(record["target_words"]) for record in aligned)
    links = run_ok("align", "checkpoint=runs/run", *files, folder=tmp_path).splitlines()
    assert len({link.split("-")[1] for link in links[0].split()}) > 1


def test_run_keeps_its_bleu_tokenizer(tmp_path: Path) -> None:
    """It is chosen at the start and kept on resume, and all runs of a comparison must have the same."""
    write_language(tmp_path, "zh")
    settings = (
        "data=text",
        f"data.path={tmp_path}",
        "data.source=en",
        "data.target=zh",
        *SETTINGS,
        "train.max_steps=4",
    )
    run_ok("train", "name=a", *settings, folder=tmp_path)
    resume = ("name=a", *settings, "resume=true", "train.max_steps=6")
    assert "bleu_tokenizer=char (was zh)" in run_error("train", *resume, "bleu_tokenizer=char", folder=tmp_path)
    run_ok("train", *resume, folder=tmp_path)
    assert "bleu_tokenizer: zh" in (tmp_path / "runs/a/config.yaml").read_text()
    run_ok("train", "name=b", *settings, "bleu_tokenizer=char", folder=tmp_path)
    compare = "compare=[runs/a,runs/b]"
    assert "tok:zh" in run_ok("evaluate", compare, folder=tmp_path)  # the tokenizer of the first run
    assert json.loads((tmp_path / "runs/b/eval/test/metrics.json").read_text())["bleu_tokenizer"] == "zh"
