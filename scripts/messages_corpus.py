"""Program messages, English and another language: a small parallel corpus that no setting here was found on.

python scripts/messages_corpus.py folder=DIR language=ru    fetches 60 MB, makes DIR/{train,valid,test}.{en,ru}

They are the gettext catalogs, in a language as gettext names it (de, pt_BR), of the packages below, of Debian 12,
from `mirror`. A message is taken if it is one line, of 6 to 60 English words, translated, and has no plural; white
space becomes one space. Of those that differ in case, digits, punctuation and format directives alone, on either side,
the alphabetically first is taken. 1,000 are for `valid`, 1,000 for `test`. Where the digest that is printed last is the
same, the text is. Releases of Debian 12 differ in a few messages; that of 12.15 should be found at
mirror=https://snapshot.debian.org/archive/debian/20260801T000000Z.
"""

import io
import lzma
import random
import re
import sys
import tarfile
from collections.abc import Iterator
from gettext import GNUTranslations
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from peer import write
from settings import settings_given
from xxhash import xxh3_128

PACKAGES = [
    "aptitude-common",
    "binutils-common",
    "coreutils",
    "cryptsetup-bin",
    "dpkg",
    "git",
    "gnupg-l10n",
    "grub-common",
    "libc-l10n",
    "libglib2.0-data",
    "libgtk-3-common",
    "libvirt-l10n",
    "mutt",
    "postgresql-15",
    "postgresql-client-15",
    "util-linux-locales",
]
HELD_OUT = 1000


def fetch(url: str) -> bytes:
    try:
        with urlopen(url, timeout=60) as answer:
            return answer.read()
    except (OSError, HTTPException) as error:
        sys.exit(f"error: {url}: {error}")


def filenames(mirror: str) -> dict[str, str]:
    """Where the mirror has each package."""
    index = lzma.decompress(fetch(f"{mirror}/dists/bookworm/main/binary-amd64/Packages.xz")).decode()
    return dict(re.findall(r"^Package: (.*)\n(?:.+\n)*?Filename: (.*)$", index, re.MULTILINE))


def catalogs(package: bytes, language: str) -> Iterator[bytes]:
    """Those of a language in a package, an `ar` archive: members of a header of 60 bytes and their content, at even
    offsets; files are in data.tar.xz."""
    offset = 8
    while offset < len(package):
        name, size = package[offset : offset + 16], int(package[offset + 48 : offset + 58])
        if name.startswith(b"data.tar"):
            with tarfile.open(fileobj=io.BytesIO(package[offset + 60 : offset + 60 + size])) as archive:
                for member in archive:
                    wanted = f"/locale/{language}/LC_MESSAGES/" in member.name and member.name.endswith(".mo")
                    if wanted and (file := archive.extractfile(member)):  # no folder
                        yield file.read()
        offset += 60 + size + size % 2


def messages(catalog: bytes) -> Iterator[tuple[str, str]]:
    """Those that have no plural, and their translations; the standard library shows a catalog no other way."""
    for message, translation in vars(GNUTranslations(io.BytesIO(catalog)))["_catalog"].items():
        if isinstance(message, str):  # it is a pair where there is a plural
            yield message.rpartition("\4")[2].strip(), translation.strip()  # what is before \4 is a context


def key(text: str) -> str:
    """What texts have in common that are the same but for case, digits, punctuation and format directives."""
    return " ".join(re.sub(r"%[-+ #\d.*$hlqjzt]*[a-z]|[\W\d_]", " ", text.casefold()).split())


def main() -> None:
    settings = settings_given(folder="", language="", mirror="https://deb.debian.org/debian")
    folder, language, mirror = Path(settings["folder"]), settings["language"], settings["mirror"]
    if not settings["folder"] or not language:
        sys.exit(__doc__)
    places = filenames(mirror)
    found: set[tuple[str, str]] = set()
    for package in PACKAGES:
        for catalog in catalogs(fetch(f"{mirror}/{places[package]}"), language):
            found.update(messages(catalog))
    known: set[str] = set()
    pairs = []
    for pair in sorted(found):
        keys = {key(text) for text in pair}
        fits = 6 <= len(pair[0].split()) <= 60 and "\n" not in "".join(pair)
        if fits and len(keys) == 2 and known.isdisjoint(keys):
            pairs.append([" ".join(text.split()) for text in pair])
            known |= keys
    if len(pairs) < 7 * HELD_OUT:
        sys.exit(f"error: language={language} has {len(pairs):,} such messages, too few for a corpus")
    random.Random(0).shuffle(pairs)
    splits = {"valid": pairs[:HELD_OUT], "test": pairs[HELD_OUT : 2 * HELD_OUT], "train": pairs[2 * HELD_OUT :]}
    folder.mkdir(parents=True, exist_ok=True)
    digest = xxh3_128()
    for split, part in splits.items():
        for side, text in zip(("en", language), zip(*part, strict=True), strict=True):
            digest.update(write(folder / f"{split}.{side}", list(text)).read_bytes())
        print(f"{split}: {len(part)} pairs")
    print(f"of {len(found)} messages; {digest.hexdigest()}")


if __name__ == "__main__":
    main()
