"""A Hugging Face hub on this machine with one model, for the real client of the hub."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HUB_ID = "owner/name"
COMMIT = "c0ffee" + 34 * "0"


@dataclass
class Hub:
    """`downloads` are the files that were sent, `tokens` the credentials of all requests."""

    files: Mapping[str, bytes]
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)


@contextmanager
def serving_hub(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """Serves the files of `HUB_ID` at its main branch, which is `COMMIT`."""
    hub = Hub(files)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        self.hub.tokens.add(self.headers.get("Authorization"))
        path = self.path.partition("?")[0]
        if path == f"/api/models/{HUB_ID}/revision/main":
            self._send(json.dumps({"id": HUB_ID, "sha": COMMIT, "siblings": []}).encode(), with_body=with_body)
        elif path == f"/api/models/{HUB_ID}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.hub.files.items()
            ]
            self._send(json.dumps(entries).encode(), with_body=with_body)
        elif (match := re.fullmatch(f"/{HUB_ID}/resolve/{COMMIT}/(.+)", path)) and match[1] in self.hub.files:
            if with_body:
                self.hub.downloads.append(match[1])
            self._send(self.hub.files[match[1]], with_body=with_body)
        else:
            self.send_error(404)

    def _send(self, data: bytes, *, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(data)
