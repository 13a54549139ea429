"""The JavaScript of the page that translates, compared with Python: model, search and tokenizer, without a page."""

import base64
import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from browser import Browser
from builders import (
    ATTENTION_STYLES,
    ODD_CHARACTERS,
    ODD_LINES,
    SEARCH_OPTIONS,
    SPECIAL_STRINGS,
    TOKENIZER_TYPES,
    VOCABULARY,
    make_attention_config,
    make_sentences,
    make_tokenizer,
    randomize_,
    round_weights,
    search,
    sharpen,
)

from nmt.config import BOS, EOS, AttentionConfig, DataConfig, ModelConfig, SearchConfig, TokenizerConfig
from nmt.config.model import ATTENTION_NORMALIZERS, ATTENTION_WINDOWS
from nmt.data.literals import FINAL_MARKS, LITERAL
from nmt.data.tokenizer import LanguageTokenizer, group_by_spaces, train_tokenizer
from nmt.data.words import may_be_unspaced
from nmt.decoding.rewriting import LineRewriter
from nmt.decoding.search import Literals
from nmt.model.attention import SCORE_CLASSES
from nmt.model.seq2seq import Seq2Seq, build_model
from nmt.page.export import (
    FOLDER,
    WORKER_FILES,
    describe_tokenizer,
    get_scores,
    pack_tensors,
    quantize_tensors,
    translate_pattern,
)

Evaluate = Callable[[str], Any]
TEXTS = (
    "สวัสดีครับ ผมชื่อ",
    "你好，世界。今天天气很好",
    "مرحبا بالعالم",
    "שלום",
    "한국어 각",
    "e\u0301 Å ﬁ ａｂｃ Ⅷ ½ ① ㌔ ﷺ ｶﾞ \u1e9b\u0323",
    "  two  spaces ",
    "läuft Haustür",
    "👩‍👩‍👧😀🏽",
)
FORCE = """
function force(source, targets) {
  let { memory, state } = model.start(source);
  return targets.map(token => {
    const read = model.step([token], state, memory);
    state = read.state;
    return { logits: [...read.logits[0]], weights: read.weights && [...read.weights[0]] };
  });
}
"""


@pytest.fixture(scope="module")
def evaluate(browser: Browser) -> Evaluate:
    """Evaluate JavaScript in a browser that has the program of the worker, except for its messages."""

    def evaluate(expression: str) -> Any:
        response = browser.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"].get("value")

    evaluate("".join((FOLDER / name).read_text(encoding="utf-8") for name in WORKER_FILES[:-1]) + FORCE)
    return evaluate


def load_model(evaluate: Evaluate, model: Seq2Seq, config: ModelConfig) -> None:
    """Make `model` in the browser, and give the Python model the same weights."""
    index, weights = pack_tensors(quantize_tensors(model))
    arguments = json.dumps(base64.b64encode(weights).decode()), json.dumps(index)
    settings = json.dumps(asdict(config) | {"memory": config.memory})
    evaluate(f"globalThis.model = new Seq2Seq(new Weights(fromBase64({arguments[0]}), {arguments[1]}), {settings}); 0")
    round_weights(model)


def build_random_model(config: ModelConfig) -> Seq2Seq:
    model = build_model(config, VOCABULARY, VOCABULARY).double()
    model.dtype = torch.float64
    randomize_(model, 0.4)
    return model.eval()


def make_ids(length: int, seed: int) -> list[int]:
    return [*random.Random(seed).choices(range(4, VOCABULARY), k=length - 1), EOS]


def check_forced_decoding(evaluate: Evaluate, config: ModelConfig) -> None:
    model = build_random_model(config)
    load_model(evaluate, model, config)
    for length in (2, 9):
        source, target = make_ids(length, 1), [BOS, *make_ids(5, 2)]
        with torch.inference_mode():
            memory, state = model.start(torch.tensor([source]), torch.tensor([length]))
            features_NTD, weights, _ = model.decode(torch.tensor([target]), state, memory)
            logits_TV = model.logits(features_NTD)[0].numpy()
        steps = evaluate(f"force({source}, {target})")
        np.testing.assert_allclose([step["logits"] for step in steps], logits_TV, atol=2e-4, rtol=1e-3)
        if weights is not None:
            np.testing.assert_allclose([step["weights"] for step in steps], weights[0], atol=1e-4)


@pytest.mark.parametrize("style", ATTENTION_STYLES)
def test_model_matches_python_for_each_score_and_window(evaluate: Evaluate, style: str) -> None:
    extras = itertools.cycle(itertools.product((1, 2), (False, True)))
    for number, (score, window) in enumerate(itertools.product(dict.fromkeys(SCORE_CLASSES), ATTENTION_WINDOWS)):
        heads, coverage = next(extras)
        if style == "transformer decoder" and "dot" in score:
            heads = 2  # without projections, sizes must be equal
        attention = {"score": score, "window": window, "normalizer": ATTENTION_NORMALIZERS[(number + number // 3) % 3]}
        config = make_attention_config(style, number, **attention, heads=heads, coverage=coverage)
        check_forced_decoding(evaluate, config)
    if style != "transformer" and ATTENTION_STYLES[style]["style"] != "transformer":
        check_forced_decoding(evaluate, make_attention_config(style, score="none"))


TRANSFORMER = {"style": "transformer", "decoder_layers": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"tie": "three", "cell": "gru", "bridge": "last", "decoder_layers": 2},
        {"tie": "two", "bidirectional": False, "bridge": "mean", "encoder_layers": 3, "residual": True},
        {"bridge": "zero", "embed": 5, "hidden": 6, "encoder_hidden": 5},
        TRANSFORMER | {"shortcut": True, "encoder_layers": 2, "tie": "two"},
        {"encoder": "transformer", "style": "luong", "encoder_hidden": 4, "bridge": "learned", "feed_forward": 7},
        TRANSFORMER | {"attention": AttentionConfig(heads=2, layer=0, head=1)},
        TRANSFORMER | {"attention": AttentionConfig(heads=2, layer=1)},
        TRANSFORMER | {"attention": AttentionConfig(heads=2, head=0)},
    ],
)
def test_model_matches_python_for_other_settings(evaluate: Evaluate, changes: dict[str, Any]) -> None:
    check_forced_decoding(evaluate, ModelConfig(**{"embed": 6, "hidden": 8, "dropout": 0.0} | changes))


WANTED = ([], [10], [12, 11])


@pytest.mark.parametrize("style", ["bahdanau", "input feeding", "transformer"])
def test_search_matches_python(evaluate: Evaluate, style: str) -> None:
    config = make_attention_config(style, score="scaled_dot" if style == "transformer" else "additive")
    model = sharpen(build_random_model(config), 1.5)
    load_model(evaluate, model, config)
    options = [options for name, options in SEARCH_OPTIONS.items() if name != "sample"]
    for settings, beam, wanted in zip(options * 2, [1] * len(options) + [4] * len(options), itertools.cycle(WANTED)):
        search_config = SearchConfig(beam=beam, n_best=beam, **{"max_ratio": 1.5} | settings)
        source = make_ids(7, beam)
        literals = Literals([10, 11, 12], [wanted])
        [expected] = search(
            model, torch.tensor([source]), torch.tensor([7]), search_config, keep_weights=True, literals=literals
        )
        given = asdict(search_config) | {"literals": {"vocabulary": literals.vocabulary, "wanted": wanted}}
        found = evaluate(
            f"search(model, {source}, {json.dumps(given)}).then(beam => beam.map(({{ tokens, score, "
            "ranking, weights }) => ({ tokens, score, ranking, weights: weights.map(row => [...row]) })))"
        )
        assert [hypothesis["tokens"] for hypothesis in found] == [hypothesis.tokens for hypothesis in expected]
        for actual, hypothesis in zip(found, expected, strict=True):
            assert actual["score"] == pytest.approx(hypothesis.score, abs=1e-3)
            assert actual["ranking"] == pytest.approx(hypothesis.ranking_score, abs=1e-3)
            np.testing.assert_allclose(actual["weights"], hypothesis.weights_TS, atol=1e-3)


# ----------------------------------------------------------------------------------------------------------- tokenizer
def load_tokenizer(evaluate: Evaluate, side: LanguageTokenizer) -> None:
    data = json.dumps(describe_tokenizer(side))
    scores = [side.processor.get_score(i) for i in range(side.vocab_size)]
    evaluate(
        "globalThis.tokenizer = (data => new LanguageTokenizer("
        "{ ...data, characterMap: fromBase64(data.characterMap) },"
        f" Float32Array.from({json.dumps(scores)})))({data}); 0"
    )


def make_odd_texts(number: int) -> list[str]:
    rng = random.Random(4)
    blocks = [(0, 0x250), (0x250, 0xD800), (0xE000, 0x11000), (0x1D400, 0x1F900)]
    parts = [
        lambda: rng.choice(ODD_CHARACTERS),
        lambda: rng.choice([*SPECIAL_STRINGS, *TEXTS, "<2de>", " <2de>", "▁<2de>", "Hund"]),
        lambda: chr(rng.randrange(*rng.choice(blocks))),
    ]
    return ["".join(rng.choice(parts)() for _ in range(rng.randrange(12))) for _ in range(number)]


@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("type", TOKENIZER_TYPES)
def test_tokenizer_matches_sentencepiece(evaluate: Evaluate, type: str, normalization: str) -> None:
    literals: dict[str, Any] = {} if type == "word" else {"literals": 2}
    tagged = train_tokenizer(
        [*make_sentences(200), *TEXTS],
        make_sentences(200),
        TokenizerConfig(type=type, vocab_size=370, normalization=normalization, **literals),
        tags=("<2de>", "<2"),
    )
    texts = ["", "a<br>\U000f0001 <br>b", *ODD_LINES, *TEXTS, *make_sentences(20), *make_odd_texts(300)]
    for side in (make_tokenizer(type, normalization=normalization).source, tagged.source):
        load_tokenizer(evaluate, side)
        ids = [side.encode([text])[0] for text in texts]
        assert evaluate(f"{json.dumps(texts)}.map(text => tokenizer.encode(text))") == ids
        rng = random.Random(5)
        ids += [rng.choices(range(side.vocab_size), k=9) for _ in range(100)]  # bytes that are not UTF-8, specials
        decoded = evaluate(f"{json.dumps(ids)}.map(ids => tokenizer.decode(ids))")
        assert decoded == [side.decode(i) for i in ids]
        if type == "word":  # a line may have other words than those between its spaces
            continue
        ids = [i for i in ids if not may_be_unspaced(side.decode(i))]  # the browser segments others
        grouped = [group_by_spaces(side.pieces(i)) for i in ids]
        found = evaluate(f"{json.dumps(ids)}.map(ids => tokenizer.groupByWords(ids))")
        assert [(each["words"], each["owners"]) for each in found] == grouped


PREPARED = [
    "Zimmer 4711, 12 oder 1?",
    "A 1.234,50 <b class='x'>x</b> https://example.org/a?b=1. www.a.org! a.b@c.org %s %(n)d {x} ${y} 100%",
    "ZIMMER 4711 ÖFFNEN <B>",
    "STRASSE NACH İZMİR",
    "DIŞARI ÇIK IRMAK",
    "在https://example.org/a，有4711个，写给a@b.org吧",
    "رقم ٤٧١١ و١٢٣ هنا",
    "1 2 3 44 55 66 77 88 99",
    "\U000f0001 und 4711",
    "OK",
]


@pytest.mark.parametrize("languages", [("de", "en"), ("tr", "az"), ("translation.de", "1")])
@pytest.mark.parametrize("protect", [False, True])
def test_lines_are_prepared_as_in_python(evaluate: Evaluate, protect: bool, languages: tuple[str, str]) -> None:
    config = TokenizerConfig(vocab_size=320, literals=4)
    tokenizer = train_tokenizer(make_sentences(200), make_sentences(200), config)
    data = DataConfig(format="text", path="x", source=languages[0], target=languages[1])
    rewriter = LineRewriter(SearchConfig(protect=protect), tokenizer, data.languages)
    pieces = tokenizer.source.pieces(tokenizer.source.literal_ids)
    literals = {"pattern": translate_pattern(LITERAL.pattern), "finalMarks": FINAL_MARKS}
    translation = "Der \U000f0000 \U000f0002 <unk> isı ß."
    found = evaluate(
        f"{json.dumps(PREPARED)}.map(line => {{ const prepared = prepareLine(line, {json.dumps(pieces)}, "
        f"{json.dumps(languages)}.map(languageOfCase), {json.dumps({'protect': protect, 'capitals': True})}, "
        f"{json.dumps(literals)}); return [prepared.text, prepared.restore({json.dumps(translation)}, 1)]; }})"
    )
    prepared = [rewriter.rewrite(line) for line in PREPARED]
    assert found == [[line.text, line.undo(translation)] for line in prepared]
    assert any(line.in_capitals for line in prepared) and any(line.originals for line in prepared) == protect


def test_words_of_scripts_without_spaces_are_separated(evaluate: Evaluate) -> None:
    side = make_tokenizer("char").source
    load_tokenizer(evaluate, side)
    [ids] = side.encode(["今天 der天气很好 สวัสดีครับ"])
    found = evaluate(f"tokenizer.groupByWords({[*ids, EOS]})")
    assert found["words"][0] == "今天" and len(found["words"]) > 4 and found["owners"][-1] == -1
    assert "".join(found["words"]) == "今天der天气很好สวัสดีครับ"
    spaced = "".join(("" if i in found["noSpaceBefore"] else " ") + word for i, word in enumerate(found["words"]))
    assert spaced == " 今天 der天气很好 สวัสดีครับ"


def test_tied_tensors_are_stored_once() -> None:
    for tie, count in (("none", 3), ("two", 2), ("three", 1)):
        model = build_model(ModelConfig(embed=8, hidden=8, tie=tie), 50, 50)
        index, _ = pack_tensors(quantize_tensors(model) | get_scores(make_tokenizer("bpe")))
        names = ("source_embedding.weight", "target_embedding.weight", "output.weight")
        assert len({index[name]["values"] for name in names}) == count


def test_scripts_do_not_end_their_element() -> None:
    for path in FOLDER.glob("*.js"):
        assert not re.search("</script|<!--", path.read_text(encoding="utf-8")), path
