"""Download from the Hugging Face hub and upload to it. A model there is named `hf://OWNER/NAME@REVISION`.

`huggingface_hub` does the work: it keeps downloads in its cache, and takes token, endpoint and offline mode from its
environment variables (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME) or from `hf auth login`. It is optional, and
imported when an address is used.
"""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nmt.errors import UserError, extra_command
from nmt.system.messages import MAX_ERROR_CHARS

PREFIX = "hf://"
LIBRARY = "nmt"  # the library name the hub records


def is_hub_address(path: str) -> bool:
    return path.startswith(PREFIX)


def parse_address(address: str) -> tuple[str, str | None]:
    """Return the repository `OWNER/NAME` of an address, and its branch, tag or commit; None stands for the main branch.

    Raises:
        UserError: it is not such an address.
    """
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([^@\s]+))?", address, re.ASCII)
    if match is None:
        raise UserError(f"{address} does not name a model of the hub; use hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    return match[1], match[2]


@contextmanager
def explained_errors(address: str) -> Iterator[None]:
    """Raise errors of the hub and of the connection to it as a `UserError` that begins with the address."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(f"{address} needs huggingface_hub; install it with: {extra_command('hub')}")
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())[:MAX_ERROR_CHARS] or type(error).__name__
        remedy = "check the network and HF_HUB_OFFLINE, or try again later"
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
            remedy = "check the name, or log in with `hf auth login` or HF_TOKEN if you have access"
        raise UserError(f"{address}: {message}; {remedy}") from None


def download(address: str, patterns: Sequence[str]) -> Path:
    """Download the files of a repository that match the patterns, unless the cache has them. Returns their folder.

    Raises:
        UserError: they cannot be downloaded and are not in the cache.
    """
    repository, revision = parse_address(address)
    with explained_errors(address):
        from huggingface_hub import snapshot_download

        folder = snapshot_download(repository, revision=revision, allow_patterns=list(patterns), library_name=LIBRARY)
    return Path(folder)


def upload(folder: Path, address: str, patterns: Sequence[str], message: str) -> str:
    """Upload the files of a folder to a repository, which is created if it does not exist, as one commit.

    Other files of the repository that match the patterns are deleted, since they are of an earlier model. Returns the
    address of the commit.

    Raises:
        UserError: the hub refuses, or cannot be reached.
    """
    repository, revision = parse_address(address)
    if revision is not None:
        raise UserError(f"{address}: models are uploaded to the main branch; remove @{revision}")
    with explained_errors(address):
        from huggingface_hub import HfApi

        api = HfApi(library_name=LIBRARY)
        api.create_repo(repository, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=list(patterns)
        )
        return str(commit.commit_url)
