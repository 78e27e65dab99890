"""python engine.py PORT: answers completions, with one child in its process group and one that has left it."""

import http.server
import os
import sys
import time


def linger(leave: bool) -> None:
    if not os.fork():
        if leave:
            os.setsid()
        while True:
            time.sleep(60)


class Engine(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"choices": [{"text": "yes"}]}')


linger(leave=False)
linger(leave=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine).serve_forever()
