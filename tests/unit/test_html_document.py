"""HTML documents: what is translated, and where tags go, given the words and their links; no model is needed."""

import random
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmt.config import TokenizerConfig
from nmt.data.html_document import VOID, HtmlDocument, Kind, Unit, decode, parse_document, tokenize
from nmt.data.html_tags import Alignment, restore_tags
from nmt.data.tokenizer import group_by_spaces, train_tokenizer
from nmt.data.words import find_spans, split_tokens
from nmt.decoding.html_translation import align_text, find_owners, link_words
from nmt.decoding.translation import Translation


def split(text: str) -> list[tuple[int, int]]:
    return find_spans(text, split_tokens(text))


def translate(document: str, target: str, links: str) -> str:
    """Translate a document with one unit, given links in Pharaoh format between words and punctuation marks."""
    parsed = parse_document(document)
    [text] = parsed.texts
    pairs = [(int(s), int(t)) for s, t in (link.split("-") for link in links.split())]
    return restore_tags(parsed, [Alignment(target, split(text), split(target), pairs)])


def translate_at_random(document: HtmlDocument, rng: random.Random) -> str:
    """Translate into random words with random links."""
    alignments = []
    for text in document.texts:
        source = split(text)
        words = rng.choices(["foo", "<b", "&amp;", "ü", "中", "</a>"], k=rng.randint(0, len(source) + 3))
        target = " ".join(words)
        links = [(rng.randrange(len(source)), t) for t in range(len(words)) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
        alignments.append(Alignment(target, source, find_spans(target, words), links))
    return restore_tags(document, alignments)


# ---------------------------------------------------------------------------------------------------------- placement
PLACED = {
    "reordered": ("Ich <b>sah</b> <i>ihn</i> gestern", "Yesterday I saw him", "0-1 1-2 2-3 3-0")
    + ("Yesterday I <b>saw</b> <i>him</i>",),
    "no space at the ends": ("<p>\n <b>Hund</b>.\t</p>", "dog.", "0-0 1-1", "<p>\n <b>dog</b>.\t</p>"),
    "smallest span": ("x <b>hat gesehen</b>", "has it seen x", "0-3 1-0 2-2", "<b>has it seen</b> x"),
    "nested": ('<a href="?x&amp;y">ein <b>Hund</b></a> da', "there one dog", "0-1 1-2 2-0")
    + ('there <a href="?x&amp;y">one <b>dog</b></a>',),
    "child without its parent's words": ("<a>ein <b>Hund</b></a> da", "dog there one", "0-2 1-0 2-1")
    + ("<a><b>dog</b> there one</a>",),
    "siblings cross": ("<b>a b</b> <i>c d</i>", "A C B D", "0-0 1-2 2-1 3-3", "<b>A</b> <i>C</i> B D"),
    "majority keeps its words": ("<b>a b c d</b> <i>e</i>", "A B E C D", "0-0 1-1 2-3 3-4 4-2")
    + ("<b>A B E C D</b><i></i>",),
    "a stray link does not": ("<b>a b c</b> <i>d e</i>", "A B D E C", "0-0 1-1 2-4 3-2 4-3")
    + ("<b>A B</b> <i>D E</i> C",),
    "not linked": ("a <b>b</b> c", "A C", "0-0 2-1", "A <b></b>C"),
    "nothing linked": ("a <b>b</b> <i>c</i>", "X Y", "", "<b></b><i></i>X Y"),
    "around everything": ("<b><i>a</i> b</b>", "X Y", "", "<b><i></i>X Y</b>"),
    "line break": ("a<br>b", "B A", "0-1 1-0", "B A<br>"),
    "images": ('a <img src="x"> b <input>c', "A B C", "0-0 1-1 2-2", 'A <img src="x"> B <input>C'),
    "comment within a word": ("Ha<!-- x -->us", "house", "0-0", "house<!-- x -->"),
    "code": ("Starte <code>a &amp; b</code> jetzt", "Now start a & b", "0-1 1-2 2-3 3-4 4-0")
    + ("Now start <code>a &amp; b</code>",),
    "code between words": ("<kbd>x</kbd> und y", "y and the x too", "0-3 1-1 2-0", "y and the <kbd>x</kbd> too"),
    "code that is not linked": ("a <code>x</code> b", "A B", "0-0 2-1", "A <code>x</code> B"),
    "formula": ("H<sub>2</sub>O ist", "is H2O", "0-1 1-0", "is H<sub>2</sub>O"),
    "formula with more": ("CO<sub>2</sub>-Steuer", "CO2 tax", "0-0 0-1", "CO<sub>2</sub> tax"),
    "formula that is lost": ("CO<sub>2</sub> da", "it is there", "0-0 0-1 1-2", "it is <sub></sub>there"),
    "note": ("Wort<sup><a>[1]</a></sup>, da", "there word,", "0-1 1-2 2-0", "there word<sup><a>[1]</a></sup>,"),
    "part of a word": ("<b>H</b>aus da", "house there", "0-0 1-1", "<b>house</b> there"),
    "entities": ("a &lt; <b>&auml;</b>&nbsp;b", "ö > b & c\u00a0d", "2-0", "<b>ö</b> &gt; b &amp; c&#160;d"),
    "Arabic": ("<b>أنا</b> أحب <i>القطط</i>.", "I love cats.", "0-0 1-1 2-2 3-3", "<b>I</b> love <i>cats</i>."),
    "into Arabic": ("I love <i>cats</i><b>!</b>", "أحب القطط!", "1-0 2-1 3-2", "أحب <i>القطط</i><b>!</b>"),
    "wrongly nested": ("x <b><i>y</b> z</i> w", "X Y Z W", "0-0 1-1 2-2 3-3", "X <b><i>Y</b> Z</i> W"),
    "end tag alone": ("x</b> y", "Y X", "0-1 1-0", "Y X</b>"),
    "start tag alone": ("x <b>y", "Y X", "0-1 1-0", "<b>Y X"),
    "element across blocks": ("<a>x <div>1</div></a>", "X", "0-0", "<a>X <div>1</div></a>"),
    "bare signs": ("a < b & c <3", "A < B & C <3", "", "A &lt; B &amp; C &lt;3"),
}


@pytest.mark.parametrize("case", PLACED)
def test_tags_go_around_linked_words(case: str) -> None:
    source, target, links, expected = PLACED[case]
    assert translate(source, target, links) == expected


def test_tags_go_around_single_characters() -> None:
    characters = [(0, 1), (1, 2), (2, 3), (3, 4)]
    words = [(0, 1), (2, 6), (7, 10), (10, 11)]
    links = [(i, i) for i in range(4)]
    for case, expected in (
        (("我<b>爱</b>你<i>。</i>", "I love you.", characters, words), "I <b>love</b> you<i>.</i>"),
        (("I <b>love</b><i> you</i>.", "我爱你。", words, characters), "我<b>爱</b><i>你</i>。"),
        (("我<b>爱</b><i>你</i>。", "我爱你。", [(0, 3), (3, 4)], [(0, 3), (3, 4)]), "我<b>爱</b><i>你</i>。"),
        (("我<b>爱</b>你。", "love", [(0, 3), (3, 4)], [(0, 4)]), "<b>love</b>"),
    ):
        document, target, source_words, target_words = case
        pairs = links[: min(len(source_words), len(target_words))]
        assert (
            restore_tags(parse_document(document), [Alignment(target, source_words, target_words, pairs)]) == expected
        )


UNITS = {
    "<html lang=de><title>A &amp; B</title><p>Ein <b>Hund</b>,\n\t eine&nbsp;Katze": ["A & B", "Ein Hund, eine Katze"],
    "<ul><li>a<li>b</ul><td>c</td><x-y>d</x-y>": ["a", "b", "c", "d"],
    "1 &lt; 2<p>– | –<p>&nbsp;<p>&#8212;": [],
    "<!DOCTYPE html><!-- a --><?xml a='>'?><![CDATA[ a > b ]]><script>a</b>'<p>'</script><style>a</style>b": ["b"],
    "<textarea>a</textarea><pre>b <i>c</i></pre><svg><text>d</text></svg><math>e</math>": [],
    "a <svg><text>b</text></svg> c<math>d</math>e": ["a c e"],
    '<p translate="no">a <b>b</b></p><p class="x notranslate y">c<p translate=yes class=notranslated>d': ["d"],
    "<div translate='NO'>a<div>b</div>c</div>d": ["d"],
    "<div title=' translate=no'>a</div><div title='translate=\"no\"'>b</div>": ["a", "b"],
    "<ul><li translate=no>a<ul><li>b</ul><li>c</ul>d": ["c", "d"],
    "a <code>b</code> <span translate=no>c <i>d</i></span> e": ["a b c d e"],
    f"a <code>{'b ' * 101}</code> c": ["a c"],
    "a.<br>b<br>c<br><br>d: <br/>e": ["a.", "b c", "d:", "e"],
    "a. b<br>c <b>&quot;d.&quot;</b>\n<br>e": ['a. b c "d."', "e"],
    "a<wbr>b<span></span>c<img>d&shy;e": ["abc de"],
    "<a href=x/>a</a> <A HREF='>'>b</A><b/>c": ["a bc"],
    "a </3 b <3 c <- d <! x>e": ["a </3 b <3 c <- d e"],
    "a <b c": ["a <b c"],
    "a <b 'c'=\"d> e": ["a"],
    "a <!-- b> c": ["a"],
    "\ufeff a": ["a"],
    "&#0;a&#99999999999999999999;&#x110000;&bogus;&amp": ["\ufffda\ufffd\ufffd&bogus;&"],
    "&#" + "0" * 5000 + "65;": [],
}


@pytest.mark.parametrize("document", UNITS, ids=lambda document: document[:40])
def test_units_are_the_text_of_blocks(document: str) -> None:
    assert parse_document(document).texts == UNITS[document]


def test_long_text_is_cut_after_sentences_or_words_and_never_in_an_entity() -> None:
    for sentence, end in (("Ein &lt;Hund&gt; bellt. ", "."), ("Hund ", "Hund"), ("&amp;x", ""), ("狗叫。", "。")):
        document = f"<p><b>{sentence * 3000}</b></p>"
        parsed = parse_document(document)
        assert 1 < len(parsed.texts) < 40 and all(text.endswith(end) for text in parsed.texts)
        assert "".join(parsed.texts).replace(" ", "") == decode(sentence * 3000).replace(" ", "")
        kept = restore_tags(parsed, [Alignment(text, [], [(0, len(text))], []) for text in parsed.texts])
        assert decode(kept.replace("<b>", "").replace("</b>", "")) == decode(f"<p>{sentence * 3000}</p>")


# --------------------------------------------------------------------------------------------------------- properties
class Tags(HTMLParser):
    """Reads a document with another parser: its tags with attributes, each with those around it."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.around: list[str] = []
        self.tags: Counter[tuple[str, ...]] = Counter()
        self.feed(document)
        self.close()
        assert not self.around, "an element has no end"

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.around.append(f"{tag} {attributes}")
        self.tags[tuple(self.around)] += 1
        if tag in VOID:
            self.around.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.around.pop().split()[0] == tag, "elements overlap"

    def handle_comment(self, data: str) -> None:
        self.tags[*self.around, data] += 1


def generate(rng: random.Random, depth: int = 0) -> str:
    """Return random well-formed mark-up: blocks, inline elements in them and around them, text."""
    parts = []
    for _ in range(rng.randint(0, 4)):
        kind = rng.random()
        attributes = f' id="{rng.randrange(10**6)}" title="&lt;&amp;>"'
        if kind < 0.5 or depth > 6:
            parts.append(rng.choice(["Hund ", " und", "a", "  ", "\n", "&nbsp;", "3 &lt; 4 ", "Haus. ", "中", "<3 "]))
        elif kind < 0.6:
            parts.append(rng.choice([f"<br{attributes}>", f"<img{attributes}>", f"<!-- {attributes} -->"]))
        else:
            tag = rng.choice(["a", "b", "i", "em", "span", "code", "sub", "div", "ul", "x-y"])
            parts.append(f"<{tag}{attributes}>{generate(rng, depth + 1)}</{tag}>")
    return "".join(parts)


@pytest.mark.parametrize("seed", range(4))
def test_well_formed_documents_stay_so_and_keep_their_tags(seed: int) -> None:
    """In 1,000 documents, whatever the links are."""
    for number in range(250):
        rng = random.Random(1000 * seed + number)
        document = f"<body>{generate(rng)}</body>"
        assert Tags(translate_at_random(parse_document(document), rng)).tags == Tags(document).tags, document


FRAGMENTS = (
    "<b> </b> <i> </i> <p> </p> < <3 </ <!-- --> <!--> <script> </script> & &amp <a|href=' '> \"> \" > Hund x \0 = ' "
    "<![CDATA[ ]]> <? ?> <code> </code> <div|translate=no> </div> <li> <br/> | \n"
)


@given(st.lists(st.sampled_from(FRAGMENTS.split(" ")), max_size=30), st.integers(0, 10**6))
def test_hostile_documents_keep_their_tags(fragments: list[str], seed: int) -> None:
    document = "".join(fragments).replace("|", " ")
    assert "".join(token.raw for token in tokenize(document)) == document
    translated = translate_at_random(parse_document(document), random.Random(seed))
    before, after = (
        Counter(token.raw for token in tokenize(text) if token.kind != Kind.TEXT) for text in (document, translated)
    )
    assert before == after


@given(st.text(max_size=50))
def test_text_without_tags_is_kept_by_a_translation_that_changes_nothing(text: str) -> None:
    parsed = parse_document(text.replace("<", ""))
    kept = restore_tags(parsed, [Alignment(line, [], [(0, len(line))] if line else [], []) for line in parsed.texts])
    assert "".join(decode(kept).split()) == "".join(decode(text.replace("<", "")).split())


HOSTILE_UNITS = (
    "<b>",
    "</b>",
    "<i>x</b>",
    "<b>y ",
    "<",
    "&",
    "<!--",
    "<a b='",
    "<br>x",
    "<code>x",
    "<?x",
    "x&nbsp;",
    " ",
)


@pytest.mark.parametrize("unit", HOSTILE_UNITS)
def test_long_hostile_documents_are_kept(unit: str) -> None:
    document = unit * 3_000 + "end"
    parsed = parse_document(document)
    assert all(len(text) <= 8000 for text in parsed.texts)
    translated = translate_at_random(parsed, random.Random(1))
    assert translated.count("<b>") == document.count("<b>") and translated.count("</b>") == document.count("</b>")


def test_deep_nesting_is_kept() -> None:
    document = "x <b>y" + "<i>" * 10_000 + "z" + "</i>" * 10_000 + "</b>"
    translated = translate_at_random(parse_document(document), random.Random(1))
    assert [token.raw for token in tokenize(translated) if token.kind != Kind.TEXT] == [
        token.raw for token in tokenize(document) if token.kind != Kind.TEXT
    ]


# -------------------------------------------------------------------------------------------------------------- links
TEXTS = ["Der Hund, den ich „sah“.", "ein é 😀 ▁ x", "我爱你。Hund 3,5", "ﬁn… ½ Ａｐｆｅｌ", "أنا أحب القطط."]


@pytest.mark.parametrize("type", ["bpe", "unigram", "char", "word"])
@pytest.mark.parametrize("normalization", ["identity", "nmt_nfkc"])
def test_pieces_belong_to_the_words_in_which_they_begin(type: str, normalization: str) -> None:
    settings = TokenizerConfig(type=type, vocab_size=280, normalization=normalization)
    side = train_tokenizer(TEXTS[:2] * 30, TEXTS[:2] * 30, settings).source
    for text in TEXTS:
        [ids] = side.encode([text])
        pieces = [*side.pieces(ids), "</s>"]
        normalized, offsets = side.processor.normalize(text, with_offsets=True)
        spans = split(text)
        owners = find_owners(pieces, normalized, offsets, spans)
        assert owners[-1] == -1 and owners[:-1] == sorted(owners[:-1])
        # Of each word between spaces, the pieces belong to its own words and marks.
        spaced = [index for index, part in enumerate(text.replace("▁", " ").split()) for _ in part]
        start_of = [len("".join(text[:start].replace("▁", " ").split())) for start, _ in spans]
        _, groups = group_by_spaces(pieces)
        if len(set(groups) - {-1}) == len(text.replace("▁", " ").split()):  # normalization may split words
            got = [spaced[start_of[owner]] for owner, group in zip(owners, groups, strict=True) if group >= 0]
            assert got == [group for group in groups if group >= 0]


@given(st.permutations(range(6)), st.integers(0, 10**6))
def test_links_find_a_permutation_behind_noise(order: list[int], seed: int) -> None:
    weights_TS = 0.1 * np.random.default_rng(seed).random((6, 6)) + np.eye(6)[order]
    for links in link_words(weights_TS, weights_TS > 0):
        assert sorted(links, key=lambda link: link[1]) == [(s, t) for t, s in enumerate(order)]


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 10**6))
def test_every_word_has_a_link(targets: int, sources: int, seed: int) -> None:
    weights_TS = np.random.default_rng(seed).random((targets, sources))
    of_targets, of_sources = link_words(weights_TS, weights_TS > 0)
    assert sorted(t for _, t in of_targets) == [*range(targets if sources else 0)]
    assert sorted(s for s, _ in of_sources) == [*range(sources if targets else 0)]
    assert link_words(weights_TS, weights_TS < 0) == ([], [])


def test_weak_links_count_for_elements_without_a_link() -> None:
    """The first one of its words for `b`, and none for `i`, which has a link."""
    parsed = parse_document("a <b>b c</b> <i>d e</i>")
    words = split("A B C D E")
    alignment = Alignment("A B C D E", split(parsed.texts[0]), words, [(0, 0), (4, 4)], [(2, 2), (1, 1), (3, 3)])
    assert restore_tags(parsed, [alignment]) == "A B <b>C</b> D <i>E</i>"


def test_words_and_marks_are_not_linked() -> None:
    side = train_tokenizer(TEXTS * 30, TEXTS * 30, TokenizerConfig(type="char", vocab_size=400))
    pieces = side.source.pieces(side.source.encode(["a, b"])[0])
    weights_TS = np.ones((len(pieces) + 1, len(pieces) + 1))
    translation = Translation("a, b", [*pieces, "</s>"], [*pieces, "</s>"], weights_TS=weights_TS)
    assert {(s == 1, t == 1) for s, t in align_text("a, b", translation, side).links} == {(True, True), (False, False)}
    without = Translation("c d e f g h", weights_TS=None)
    assert align_text("a, b", without, side).links == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert align_text("a, b", Translation(""), side).links == []


def test_units_do_not_change_when_they_are_restored() -> None:
    parsed = parse_document("<p>a <b>b</b>.</p>")
    [unit] = [part for part in parsed.parts if isinstance(part, Unit)]
    first, second = (
        restore_tags(parsed, [Alignment("B A.", split(unit.text), split("B A."), [(0, 1), (1, 0)])]) for _ in "12"
    )
    assert first == second == "<p><b>B</b> A.</p>"
