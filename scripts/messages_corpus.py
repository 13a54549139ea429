"""Make a small parallel corpus of program messages, on which no setting of nmt was tuned.

python scripts/messages_corpus.py folder=DIR language=ru    # downloads 60 MB, writes DIR/{train,valid,test}.{en,ru}

The messages are those of the gettext catalogs of some Debian 12 packages (see `PACKAGES`), downloaded from `mirror`;
`language` is a gettext name (de, pt_BR). A message is used if it is translated, has no plural, and is one line of 6 to
60 English words; white space is normalized to single spaces. Of messages that differ only in case, digits, punctuation
and format directives, on either side, the alphabetically first is used. 1,000 are for `valid`, 1,000 for `test`. The
hash that is printed last identifies the text. Releases of Debian 12 differ in a few messages; that of 12.15 should be
at mirror=https://snapshot.debian.org/archive/debian/20260801T000000Z.
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

from common import parse_settings, write_lines
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


def list_package_files(mirror: str) -> dict[str, str]:
    """Return the path of each package on the mirror."""
    index = lzma.decompress(fetch(f"{mirror}/dists/bookworm/main/binary-amd64/Packages.xz")).decode()
    return dict(re.findall(r"^Package: (.*)\n(?:.+\n)*?Filename: (.*)$", index, re.MULTILINE))


def iter_catalogs(package: bytes, language: str) -> Iterator[bytes]:
    """Yield the catalogs of a language in a Debian package.

    A package is an `ar` archive, of members with a header of 60 bytes at even offsets. Its files are in data.tar.xz.
    """
    offset = 8
    while offset < len(package):
        name, size = package[offset : offset + 16], int(package[offset + 48 : offset + 58])
        if name.startswith(b"data.tar"):
            with tarfile.open(fileobj=io.BytesIO(package[offset + 60 : offset + 60 + size])) as archive:
                for member in archive:
                    wanted = f"/locale/{language}/LC_MESSAGES/" in member.name and member.name.endswith(".mo")
                    if wanted and (file := archive.extractfile(member)):  # None for a folder
                        yield file.read()
        offset += 60 + size + size % 2


def iter_messages(catalog: bytes) -> Iterator[tuple[str, str]]:
    """Yield messages without plural and their translations; gettext has no public access to all of a catalog."""
    for message, translation in vars(GNUTranslations(io.BytesIO(catalog)))["_catalog"].items():
        if isinstance(message, str):  # a tuple if the message has a plural
            yield message.rpartition("\4")[2].strip(), translation.strip()  # a context may precede \4


def normalize_message(text: str) -> str:
    """Return text without case, digits, punctuation and format directives."""
    return " ".join(re.sub(r"%[-+ #\d.*$hlqjzt]*[a-z]|[\W\d_]", " ", text.casefold()).split())


def main() -> None:
    settings = parse_settings(folder="", language="", mirror="https://deb.debian.org/debian")
    folder, language, mirror = Path(settings["folder"]), settings["language"], settings["mirror"]
    if not settings["folder"] or not language:
        sys.exit(__doc__)
    places = list_package_files(mirror)
    found: set[tuple[str, str]] = set()
    for package in PACKAGES:
        for catalog in iter_catalogs(fetch(f"{mirror}/{places[package]}"), language):
            found.update(iter_messages(catalog))
    known: set[str] = set()
    pairs = []
    for pair in sorted(found):
        keys = {normalize_message(text) for text in pair}
        fits = 6 <= len(pair[0].split()) <= 60 and "\n" not in "".join(pair)
        if fits and len(keys) == 2 and known.isdisjoint(keys):
            pairs.append([" ".join(text.split()) for text in pair])
            known |= keys
    if len(pairs) < 7 * HELD_OUT:
        sys.exit(f"error: language={language} has only {len(pairs):,} such messages, too few for a corpus")
    random.Random(0).shuffle(pairs)
    splits = {"valid": pairs[:HELD_OUT], "test": pairs[HELD_OUT : 2 * HELD_OUT], "train": pairs[2 * HELD_OUT :]}
    folder.mkdir(parents=True, exist_ok=True)
    digest = xxh3_128()
    for split, part in splits.items():
        for side, text in zip(("en", language), zip(*part, strict=True), strict=True):
            digest.update(write_lines(folder / f"{split}.{side}", list(text)).read_bytes())
        print(f"{split}: {len(part)} pairs")
    print(f"of {len(found)} messages; {digest.hexdigest()}")


if __name__ == "__main__":
    main()
