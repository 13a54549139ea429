"""A small imitation of the HTTP API of the Hugging Face hub on this machine, with models in memory."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

Files = dict[str, bytes]


class FakeHub(ThreadingHTTPServer):
    """Repositories have commits on one branch, `main`, and no files that Git LFS keeps apart."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, list[tuple[str, Files]]] = {}  # digest and files of the commits of each repository
        self.requests: list[str] = []
        self.token = "hf_secret"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repository: str, files: Files) -> None:
        digest = hashlib.sha1(repr((len(self.commits[repository]), sorted(files.items()))).encode()).hexdigest()
        self.commits[repository].append((digest, files))


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.reply({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        is_write = self.command == "POST" and "validate-yaml" not in path
        if is_write and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.refuse(401, "Unauthorized")
        elif path == "/api/repos/create":
            repository = "{organization}/{name}".format(**json.loads(body))
            if repository not in self.server.commits:
                self.server.commits[repository] = []
                self.server.commit(repository, {".gitattributes": b"*.safetensors filter=lfs\n"})
            self.reply({"url": f"{self.server.url}/{repository}", "name": repository})
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.reply({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self.add_commit(match[1], [json.loads(line) for line in body.splitlines()])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self.describe(match[1], match[2] or "revision", match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.send_file(*match.groups())
        else:
            self.refuse(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = handle_any

    def add_commit(self, repository: str, entries: list[dict[str, Any]]) -> None:
        files = dict(self.server.commits[repository][-1][1])
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        self.server.commit(repository, files)
        digest = self.server.commits[repository][-1][0]
        self.reply({"commitUrl": f"{self.server.url}/{repository}/commit/{digest}", "commitOid": digest})

    def find(self, repository: str, revision: str) -> tuple[str, Files] | None:
        """Return a commit, or refuse the request."""
        commits = self.server.commits.get(repository, [])
        found = (
            commits[-1] if revision == "main" and commits else {commit[0]: commit for commit in commits}.get(revision)
        )
        if found is None:
            self.refuse(404, "RevisionNotFound" if commits else "RepoNotFound")
        return found

    def describe(self, repository: str, kind: str, revision: str) -> None:
        if repository == "owner/gated":
            self.refuse(403, "GatedRepo")
        elif found := self.find(repository, revision):
            digest, files = found
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repository, "sha": digest, "siblings": siblings, "private": False, "tags": []}
            sizes = [{"path": n, "size": len(content), "oid": git_digest(content)} for n, content in files.items()]
            self.reply(info if kind == "revision" else [{"type": "file"} | file for file in sizes])

    def send_file(self, repository: str, revision: str, name: str) -> None:
        if found := self.find(repository, revision):
            digest, files = found
            if name in files:
                self.reply(files[name], ETag=f'"{git_digest(files[name])}"', X_Repo_Commit=digest)
            else:
                self.refuse(404, "EntryNotFound")


@contextmanager
def running_hub(cache: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Start a hub that this process and those that it starts use, with a cache of its own."""
    with FakeHub() as hub:
        threading.Thread(target=hub.serve_forever, args=[0.02], daemon=True).start()
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        settings = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        for name, text in {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub
        hub.shutdown()
