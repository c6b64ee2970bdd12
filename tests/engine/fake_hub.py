"""A Hugging Face Hub of one repository on localhost: as much of its HTTP as the client asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "a" * 40


@dataclass
class FakeHub:
    """Serves the files of a folder as `org/m`. `stall_at` is a byte of the weights after which nothing more comes."""

    folder: Path
    url: str = ""
    stall_at: int | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    served: list[str] = field(default_factory=list)  # the names of files whose bytes were sent


@contextmanager
def serve(folder: Path) -> Iterator[FakeHub]:
    hub = FakeHub(folder)

    class Handler(_Handler):
        hub_of = hub

    server = _Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no fault of the server's."""


class _Handler(BaseHTTPRequestHandler):
    hub_of: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing: the test's output is its own."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        parts = [part for part in urlsplit(self.path).path.split("/") if part]
        match parts:
            case ["api", "models", "org", "m"] | ["api", "models", "org", "m", "revision", _]:
                self._send(json.dumps(self._info()).encode(), body=body)
            case ["api", "models", "org", "m", "tree", *_]:
                self._send(json.dumps(self._tree()).encode(), body=body)
            case ["org", "m", "resolve", _, name] if (self.hub_of.folder / name).is_file():
                self._file(self.hub_of.folder / name, body=body)
            case _:
                self._send(b'{"error": "Repository not found"}', body=body, status=404)

    def _names(self) -> list[Path]:
        return sorted(self.hub_of.folder.iterdir())

    def _info(self) -> dict[str, object]:
        files = [{"rfilename": file.name, "size": file.stat().st_size} for file in self._names()]
        return {"id": "org/m", "modelId": "org/m", "sha": COMMIT, "private": False, "siblings": files, "tags": []}

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
            for file in self._names()
        ]

    def _file(self, file: Path, *, body: bool) -> None:
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.hub_of.served.append(file.name)
            self._stream(file, data)

    def _stream(self, file: Path, data: bytes) -> None:
        stall = self.hub_of.stall_at
        if stall is None or file.suffix != ".safetensors":
            self.wfile.write(data)
            return
        self.wfile.write(data[:stall])
        self.wfile.flush()
        self.hub_of.stalled.set()
        self.hub_of.released.wait()
        self.close_connection = True

    def _send(self, data: bytes, *, body: bool, status: int = 200) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
