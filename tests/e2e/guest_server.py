"""What the tests of ports run in a guest: servers of HTTP, of a WebSocket, and of a protocol of their own.

Given to `python3 -c` as its source, so it stands alone. Port 8000 speaks HTTP, 9000 sends back what it is
sent, and at the end how much that was; what becomes of each such connection is noted in /tmp/noted.
"""

import base64
import hashlib
import http.server
import json
import socketserver
import threading
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path

PIECE = bytes(range(256)) * 64


class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path == "/big":
            self.big(int(query["bytes"]))
        elif url.path == "/echo":
            self.echo()
        elif url.path == "/redirect":
            self.told(b"", 302, [("Location", query["to"])])
        elif url.path == "/evil":
            self.told(
                b"evil",
                401,
                [
                    ("Set-Cookie", "a=b; Path=/"),
                    ("WWW-Authenticate", "Basic realm=agent"),
                    ("X-Request-Id", "req_of_the_guest"),
                    ("Forktree-Session", "another"),
                    ("Strict-Transport-Security", "max-age=1"),
                    ("Connection", "X-Hop"),
                    ("X-Hop", "1"),
                    ("X-Kept", "yes"),
                ],
            )
        elif url.path == "/noise":
            self.wfile.write(b"SSH-2.0 this is no HTTP\r\n\r\n")
            self.close_connection = True
        elif url.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
        elif url.path == "/who":
            self.told(Path("/run/forktree/identity").read_bytes())
        else:
            seen = {"path": self.path, "headers": [[name, value] for name, value in self.headers.items()]}
            self.told(json.dumps(seen).encode())

    def do_POST(self) -> None:
        digest, count = hashlib.sha256(), 0
        for piece in self.body():
            digest.update(piece)
            count += len(piece)
        self.told(json.dumps({"bytes": count, "sha256": digest.hexdigest()}).encode())

    do_HEAD = do_GET

    def body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length", 0))
        while left:
            piece = self.rfile.read(min(left, 1 << 16))
            left -= len(piece)
            yield piece

    def told(self, body: bytes, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def big(self, count: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(count))
        self.end_headers()
        while count:
            count -= self.wfile.write(PIECE[:count])

    def echo(self) -> None:
        """A WebSocket that sends each message back, and closes when it is told to."""
        magic = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(magic.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.send_header("Sec-WebSocket-Protocol", self.headers.get("Sec-WebSocket-Protocol", "none"))
        self.end_headers()
        self.close_connection = True
        while len(head := self.rfile.read(2)) == 2:
            size = head[1] & 127
            length = size.to_bytes(1, "big")
            if size > 125:
                extended = self.rfile.read(2 if size == 126 else 8)
                length, size = length + extended, int.from_bytes(extended, "big")
            mask = int.from_bytes(self.rfile.read(4) * (size // 4 + 1), "big")
            data = self.rfile.read(size)
            plain = int.from_bytes(data + bytes(4 * (size // 4 + 1) - size), "big") ^ mask
            data = plain.to_bytes(4 * (size // 4 + 1), "big")[:size]
            self.wfile.write(head[:1] + length + data)
            if head[0] & 15 == 8:
                return

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing."""


class Counting(socketserver.BaseRequestHandler):
    """Sends what it is sent straight back, and at the end how much that was."""

    def handle(self) -> None:
        count, how = 0, "ended"
        try:
            while data := self.request.recv(1 << 16):
                count += len(data)
                self.request.sendall(data)
            self.request.sendall(b"%d bytes" % count)
        except ConnectionError:
            how = "reset"
        with Path("/tmp/noted").open("a") as noted:
            noted.write(f"{how} {count}\n")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    threading.Thread(target=Server(("127.0.0.1", 9000), Counting).serve_forever).start()
    Server(("127.0.0.1", 8000), Web).serve_forever()
