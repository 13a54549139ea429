"""Take the picture of a page of `nmt.export` in docs/pictures/page.png with a headless Chromium.

    python scripts/page_picture.py page=mine.html text='Die Frau liest ein Buch .' word=3

Types the text into the page, points at a word of the translation and writes a PNG file.
"""

import base64
import sys
import tempfile
import time
from pathlib import Path

from settings import parse_settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))
from browser import Browser  # type: ignore[import-not-found]  # noqa: E402

WIDTH = 1280  # pixels


def main() -> None:
    settings = parse_settings(
        page="mine.html",
        text="Die Frau liest ein Buch .",
        word="1",
        output=str(ROOT / "docs" / "pictures" / "page.png"),
    )
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=800, deviceScaleFactor=1, mobile=False)
        browser.open(Path(settings["page"]).resolve().as_uri())
        browser.type(settings["text"])
        while not browser.evaluate("state.textContent.startsWith('Translated')"):
            time.sleep(0.1)
        browser.hover(f"#translation .word:nth-of-type({settings['word']})")
        height = browser.evaluate("document.getElementById('about').getBoundingClientRect().bottom + scrollY + 24")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
        picture = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        browser.close()
    Path(settings["output"]).write_bytes(base64.b64decode(picture["data"]))


if __name__ == "__main__":
    main()
