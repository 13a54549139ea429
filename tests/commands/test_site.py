"""The documentation as a site."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from builders import ROOT


def test_site_builds_without_warnings_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra `docs` has mkdocs-material")
    folder = tmp_path / "site"
    python_folder = shlex.quote(str(Path(sys.executable).parent))
    make = ["make", "-o", ".venv/.installed", "docs", f"BIN={python_folder}", f"ARGS=--site-dir={folder}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (folder / "search" / "search_index.json").stat().st_size > 100_000
    pictures, missing = set(), []
    for page in folder.rglob("index.html"):
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text(encoding="utf-8")):
            path = unquote(urldefrag(link).url)
            if not path or re.match(r"\w+:|/", path):  # within the page, or elsewhere
                continue
            target = Path(os.path.normpath(page.parent / path))
            if not target.exists():
                missing.append(f"{page.relative_to(folder)}: {link}")
            elif target.suffix == ".png":
                pictures.add(target.relative_to(folder))
    assert not missing
    assert Path("docs", "alignment.png") in pictures and len(pictures) > 9
