"""Runs in the guest: a browser with one page open, and the server that it talks to. Imports nothing of ours.

Asked on loopback by one line of JavaScript; the answer is its value in the page, as JSON. The page remembers
what it said, has a cookie from the server, and one WebSocket that stays open. The server remembers what it
heard by each connection.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

PORT = 7000
SITE = 8000
MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Of every WebSocket's handshake: RFC 6455, 4.2.2."""
BROWSER = (
    "chromium-headless-shell",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--user-data-dir=/tmp/profile",
    "--remote-debugging-pipe",
    f"http://127.0.0.1:{SITE}/",
)

PAGE = """<!doctype html><title>page</title><script>
const born = crypto.randomUUID();
const said = [];
const link = new WebSocket("ws://127.0.0.1:8000/link");
const opened = new Promise((done) => { link.onopen = done; });
async function say(word) {
    await opened;
    said.push(word);
    const answer = new Promise((done) => { link.onmessage = (event) => done(JSON.parse(event.data)); });
    link.send(word);
    return await answer;
}
async function look() {
    const sent = await (await fetch("/cookie")).text();
    return { born, said, cookie: document.cookie, sent, link: link.readyState };
}
</script>"""


class Site(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections = itertools.count(1)

    def do_GET(self) -> None:
        if self.path == "/link":
            self._talk()
            return
        body = {"/": PAGE, "/cookie": self.headers.get("Cookie", "")}.get(self.path)
        self.send_response(200 if body is not None else 404)
        content = (body or "").encode()
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content)))
        if self.path == "/":
            self.send_header("Set-Cookie", f"visitor={os.urandom(8).hex()}")
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Not told."""

    def _talk(self) -> None:
        """A WebSocket, until the page closes it."""
        connection, heard = next(self.connections), list[str]()
        accept = hashlib.sha1((self.headers["Sec-WebSocket-Key"] + MAGIC).encode()).digest()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(accept).decode())
        self.end_headers()
        while True:
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 0x0F == 8:
                return
            # All is short, so that its length is in the second byte; of what a browser sends, beside the bit
            # that says "masked".
            mask, word = self.rfile.read(4), self.rfile.read(head[1] & 0x7F)
            heard.append(bytes(byte ^ mask[at % 4] for at, byte in enumerate(word)).decode())
            answer = json.dumps({"connection": connection, "heard": heard}).encode()
            self.wfile.write(bytes([0x81, len(answer)]) + answer)


class Browser:
    """Chromium, asked by its own protocol over two pipes: JSON, ended by a zero."""

    def __init__(self) -> None:
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        # It reads descriptor 3 and writes to 4.
        redirected = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        subprocess.Popen(["bash", "-c", redirected, "browser", *BROWSER], pass_fds=(to_browser, from_browser))
        self._ids = itertools.count(1)
        self._rest = b""
        targets = cast("list[dict[str, object]]", self.command("Target.getTargets")["targetInfos"])
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = str(self.command("Target.attachToTarget", targetId=page, flatten=True)["sessionId"])

    def wait_for_page(self) -> None:
        """Until it has loaded and is connected. It takes most of a minute under emulation."""
        while self.value("typeof link == 'object' && link.readyState") != "1":
            time.sleep(0.2)

    def command(self, method: str, session: str | None = None, **parameters: object) -> dict[str, object]:
        number = next(self._ids)
        order: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            order["sessionId"] = session
        os.write(self._commands, json.dumps(order).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == number:
                if "error" in answer:
                    raise ValueError(json.dumps(answer["error"]))
                result: dict[str, object] = answer["result"]
                return result

    def _message(self) -> bytes:
        while b"\0" not in self._rest:
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise SystemExit("the browser ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return message

    def value(self, expression: str) -> str:
        """Raises `ValueError` where the page throws."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        result = self.command("Runtime.evaluate", self._session, **asked)
        if "exceptionDetails" in result:
            raise ValueError(json.dumps(result["exceptionDetails"]))
        return json.dumps(cast("dict[str, object]", result["result"]).get("value"))


def main() -> None:
    site = ThreadingHTTPServer(("127.0.0.1", SITE), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    browser = Browser()
    browser.wait_for_page()
    with socket.create_server(("127.0.0.1", PORT)) as server:
        while True:
            client, _ = server.accept()
            with client, client.makefile("rw") as lines:
                try:
                    verdict = f"ok {browser.value(lines.readline().strip())}"
                except ValueError as error:
                    verdict = f"refused {error}"
                lines.write(f"{verdict}\n")


if __name__ == "__main__":
    main()
