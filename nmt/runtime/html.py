"""Self-contained HTML pages: a template whose placeholders are filled in, and which loads and runs nothing else."""

import base64
import hashlib
import re
from pathlib import Path

PLACEHOLDER = re.compile(r"<!--([A-Z]+)-->")


def fill_template(path: Path, parts: dict[str, str]) -> str:
    """Return the page of a template file, with each placeholder such as `<!--TITLE-->` replaced by its part.

    The placeholder POLICY becomes a content security policy that allows only the style and script of the template, by
    their digests, so nothing in the data can be executed.

    Args:
        path: the template.
        parts: HTML by placeholder; text must be escaped.
    """
    template = path.read_text(encoding="utf-8")
    parts = parts | {"POLICY": build_security_policy(template)}
    # In a single pass, so that placeholders in inserted text are not replaced.
    return PLACEHOLDER.sub(lambda match: parts[match[1]], template)


def build_security_policy(template: str) -> str:
    """Return a content security policy that allows nothing but the style and the script of the template."""
    sources = {tag: "'none'" for tag in ("style", "script")}
    for tag in sources:
        for content in re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL):
            sources[tag] = f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    return (
        f"default-src 'none'; style-src {sources['style']}; script-src {sources['script']}; "
        "base-uri 'none'; form-action 'none'"
    )
