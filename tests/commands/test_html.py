"""HTML documents, translated by the command, from Python and by the server."""

import gzip
import html
import logging
import re
from collections import Counter
from pathlib import Path

import pytest
from builders import TINY_SETTINGS, run_error, run_ok
from servers import DIRECTION, ask, post, running

import nmt
from nmt.data.html_document import parse_document
from nmt.decoding.html_translation import list_texts

SETTINGS = ("checkpoint=runs/mine", "precision=fp32", "search.beam=2")
PAGE = """<!DOCTYPE html>
<html lang="de">
  <head><title>Der Hund &amp; die Katze</title><meta charset="utf-8">
  <script>if (a < b) document.write("<p>Der Hund</p>");</script></head>
  <body class='x "y"'><!-- Der Hund -->
    <h1>Die <em>Frau</em> liest ein <a href="buch.html?a=1&b=2" title="Das Buch">Buch</a> .</h1>
    <p>Der <b>Hund <i>schläft</i></b> .<br>Die Katze <code>x &lt; y</code> schläft .
    <p translate="no">Der Hund</p>\t
    <ul><li>\u00a0Der Mann <img src="a.png" alt="Der Hund"> sieht <b>die</b> <i>Katze</i> .<li> 1,5 &nbsp; </ul>
    <pre>  Der Hund
    schläft</pre>
    <p>日<b>本</b>語 مرحبا <i>بالعالم</i> \0 <span class="notranslate">x</span> &</p>
  </body>
</html>
"""


def list_tags(document: str) -> Counter[str]:
    return Counter(re.findall(r"<[^>]*>", re.sub(r"<script>.*?</script>", "", document)))


def read_blocks(document: str) -> list[str]:
    """The text of each block."""
    return list_texts(parse_document(document))


def test_command_keeps_everything_but_the_text(home: Path) -> None:
    (home / "page.html").write_bytes(PAGE.encode())
    run_ok("translate", *SETTINGS, "input=page.html", "output=out.html", "format=html", folder=home)
    out = (home / "out.html").read_bytes().decode()
    assert list_tags(out) == list_tags(PAGE) and out != PAGE
    for kept in (
        '<!DOCTYPE html>\n<html lang="de">\n  <head><title>',
        '<script>if (a < b) document.write("<p>Der Hund</p>");</script></head>\n',
        "  <body class='x \"y\"'><!-- Der Hund -->\n",
        '<p translate="no">Der Hund</p>\t\n    <ul><li>\u00a0',
        "<li> 1,5 &nbsp; </ul>\n    <pre>  Der Hund\n    schläft</pre>\n    <p>",
        "<code>x &lt; y</code>",
        "</p>\n  </body>\n</html>\n",
    ):
        assert kept in out
    (home / "page.html.gz").write_bytes(gzip.compress(PAGE.encode()))
    run_ok("translate", *SETTINGS, "input=page.html.gz", "output=out.html.gz", "format=html", folder=home)
    assert gzip.decompress((home / "out.html.gz").read_bytes()) == out.encode()
    assert run_ok("translate", *SETTINGS, "format=html", folder=home, text=PAGE.encode()) == out
    assert nmt.load(home / "runs" / "mine", precision="fp32", beam=2).translate_html(PAGE) == out


def test_text_of_a_block_is_that_of_its_translation_as_a_line(home: Path) -> None:
    """So a block does not depend on the others, and tags neither add nor remove words."""
    model = nmt.load(home / "runs" / "mine", precision="fp32", beam=2)
    blocks = [block for block in read_blocks(PAGE) if " x" not in block]  # those without words that are kept
    page = "".join(f"<p>{html.escape(block)}</p>" for block in blocks)
    expected = [" ".join(line.text.split()) for line in model.translate(blocks)]
    translated = re.findall("<p>(.*?)</p>", model.translate_html(page))
    assert [" ".join(html.unescape(line).split()) for line in translated] == expected
    tagged = "".join(f"<p><b>{re.sub(' ', '</b> <b>', html.escape(block))}</b></p>" for block in blocks)
    translated = re.findall("<p>(.*?)</p>", re.sub("</?b>", "", model.translate_html(tagged)))
    assert [" ".join(html.unescape(line).split()) for line in translated] == expected


def test_long_blocks_and_samples_keep_their_tags(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    page = "<p>" + "Die <b>Frau</b> liest ein Buch . " * 400 + "</p><p>" + "😀<i>😀</i>" * 1500 + "</p>"
    model = nmt.load(home / "runs" / "mine", precision="fp32", sample=True, max_length=20)
    with caplog.at_level(logging.WARNING, logger="nmt"):
        assert list_tags(model.translate_html(page)) == list_tags(page)
    assert "translated in parts" in caplog.text


INVALID = [
    (("search.n_best=2",), b"", "format=html writes one document; remove alignments=, prefix= and search.n_best="),
    (("alignments=x",), b"", "format=html writes one document; remove alignments="),
    (("target=x",), b"", "target=x gives scores of lines; remove format="),
    (("checkpoint=runs/sightless",), b"", "format=html needs a model with attention"),
]


@pytest.fixture(scope="module")
def blind(home: Path, corpus: Path) -> Path:
    """`home`, with a model without attention."""
    settings = ("data=text", f"data.path={corpus}", *TINY_SETTINGS, "train.max_steps=1", "model.attention.score=none")
    run_ok("train", "name=sightless", *settings, folder=home)
    return home


@pytest.mark.parametrize(("settings", "text", "message"), INVALID)
def test_invalid_input_is_an_error(blind: Path, settings: tuple[str, ...], text: bytes, message: str) -> None:
    arguments = settings if "checkpoint=runs/sightless" in settings else (*SETTINGS, *settings)
    assert message in run_error("translate", *arguments, "format=html", folder=blind, text=text)


# ------------------------------------------------------------------------------------------------------------- server
def test_server_answers_as_the_command(blind: Path) -> None:
    model = nmt.load(blind / "runs" / "mine", precision="fp32", beam=3)
    expected = model.translate_html(PAGE)
    with running(blind, "checkpoint=runs/mine") as started:
        assert ask(started.url, PAGE, format="html") == {"translatedText": expected}
        texts = [PAGE, "", "<p></p>", "Der <b>Hund</b>"]
        answers = ask(started.url, texts, format="html", alternatives=1, details=True)
        assert answers["translatedText"] == [expected, "", "<p></p>", model.translate_html(texts[3])]
        assert [len(details) for details in answers["details"]] == [len(read_blocks(text)) for text in texts]
        assert list_tags(answers["alternatives"][0][0]) == list_tags(PAGE)
    with running(blind, "checkpoint=runs/sightless") as started:
        status, answer = post(started.url, {"q": "<p>x</p>", "format": "html"} | DIRECTION)
        assert (status, answer["error"]) == (
            400,
            "format=html needs a model with attention; send plain text with format=text",
        )
