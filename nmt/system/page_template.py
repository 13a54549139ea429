"""Self-contained HTML pages: a template whose placeholders are filled in, and which loads and runs nothing else."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

INCLUDE = re.compile(r"(?:/\*|<!--)include (\S+)(?:\*/|-->)")
PLACEHOLDER = re.compile(r"<!--([A-Z]+)-->")


def fill_template(path: Path, parts: dict[str, str]) -> str:
    """Return the page of a template file, with each placeholder such as `<!--TITLE-->` replaced by its part.

    `<!--include NAME-->`, in style and script `/*include NAME*/`, stands for the file NAME, relative to the template.
    The placeholder POLICY becomes a content security policy that allows only the styles and scripts of the template, by
    their digests, so nothing in the data can be executed.

    Args:
        path: the template.
        parts: HTML by placeholder; text must be escaped.
    """
    template = path.read_text(encoding="utf-8")
    template = INCLUDE.sub(lambda match: (path.parent / match[1]).read_text(encoding="utf-8"), template)
    parts = parts | {"POLICY": build_security_policy(template)}
    # In a single pass, so that placeholders in inserted text are not replaced.
    return PLACEHOLDER.sub(lambda match: parts[match[1]], template)


def build_security_policy(template: str) -> str:
    """Return a content security policy that allows nothing but the styles and scripts of the template.

    If a script starts a worker, its program may come from the page itself (`blob:`). If it sends requests, they may go
    to the server that the page came from.
    """
    sources = {}
    for tag in ("style", "script"):
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        sources[tag] = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    policy = f"default-src 'none'; style-src {sources['style']}; script-src {sources['script']}; "
    policy += "worker-src blob:; " if "new Worker(" in template else ""
    policy += "connect-src 'self'; " if "fetch(" in template else ""
    return policy + "base-uri 'none'; form-action 'none'"


def dump_script_json(value: Any) -> str:
    """Return JSON that is safe in a script element: without `</script>`, comments, and JavaScript line terminators."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)
