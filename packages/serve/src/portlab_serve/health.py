"""The image's health check, `python -m portlab_serve.health`: asks the server that portlab-serve started.

A health check knows neither the server's port nor its address, which stand in the command line that the container was
given. So portlab-serve leaves the address in the file that PORTLAB_SERVE_HEALTH_FILE names, and this reads it.
"""

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

VARIABLE = "PORTLAB_SERVE_HEALTH_FILE"
TIMEOUT = 4.0  # seconds; the image allows five for all of it


def record(address: str) -> None:
    """Leave the server's address, `http://host:port`, if VARIABLE names a file."""
    if name := os.getenv(VARIABLE):
        Path(name).write_text(address, encoding="utf-8")


def main() -> int:
    """Print what /health answers; returns 0 if that is 200, else 1."""
    try:
        url = Path(os.environ[VARIABLE]).read_text(encoding="utf-8") + "/health"
        # The server is on this machine, whatever proxy the environment names.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=TIMEOUT) as answer:
            print(f"{url}: {answer.status}")
            return 0 if answer.status == 200 else 1
    except (KeyError, FileNotFoundError):
        print(f"no server was started yet: {VARIABLE} names no file")
    except urllib.error.HTTPError as error:
        print(f"{url}: {error.code}")
    except OSError as error:
        print(f"{url}: {getattr(error, 'reason', error)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
