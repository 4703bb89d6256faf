"""vLLM's server as it is while the image is tried: answers /health until SIGTERM, then exits with a code of its own."""

import argparse
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

EXIT_CODE = 7


class Health(BaseHTTPRequestHandler):
    """200 for /health, 404 for all else."""

    def do_GET(self) -> None:
        """Answer without a body."""
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


def main() -> None:
    """Serve; other options of vLLM's are taken and ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8000)
    server = HTTPServer(("127.0.0.1", parser.parse_known_args()[0].port), Health)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_CODE))
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
