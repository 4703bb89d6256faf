"""Checkpoints in a bucket are read where they lie: TensorStore's own driver against a server that speaks GCS."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from portlab_merge.location import open_location
from portlab_spec.errors import UserError


@dataclass(frozen=True)
class Bucket:
    """gs://experiments: a folder, served as Google Cloud Storage's JSON API serves objects."""

    folder: Path
    url: str

    def merge_ckpt(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TENSORSTORE_GCS_HTTP_URL": self.url, "GOOGLE_APPLICATION_CREDENTIALS": ""}
        command = [sys.executable, "-m", "portlab_merge", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    root = tmp_path / "bucket"
    root.mkdir()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            path = url.path.removeprefix("/storage/v1/b/experiments")
            if path == "/o":
                names = sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
                first, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
                items = [{"name": name, "generation": "1"} for name in names if first <= name < end]
                self.answer(200, json.dumps({"items": items}).encode())
            elif path.startswith("/o/") and (root / unquote(path[3:])).is_file():
                data = (root / unquote(path[3:])).read_bytes()
                if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                    start, last = int(match[1]), int(match[2] or len(data) - 1)
                    content_range = f"bytes {start}-{last}/{len(data)}"
                    self.answer(206, data[start : last + 1], {"Content-Range": content_range})
                else:
                    self.answer(200, data)
            else:
                self.answer(404, b"{}")

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"x-goog-generation": "1", "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Bucket(root, f"http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()


@pytest.mark.parametrize("layout", [{}, {"ocdbt": False}, {"ocdbt": False, "zarr3": True}])
def test_a_run_in_a_bucket_merges_to_the_same_bytes(
    bucket, base, make_tree, describe, save, command: Callable[..., Any], tmp_path, layout
):
    tree = make_tree(base)
    save(tmp_path / "run" / "checkpoints", tree, describe(base, tree), **layout)
    shutil.copytree(tmp_path / "run", bucket.folder / "team" / "run")
    there = bucket.merge_ckpt("merge", "--ckpt", "gs://experiments/team/run", "--out", tmp_path / "there", "--json")
    here = command("merge", "--ckpt", tmp_path / "run", "--out", tmp_path / "here", "--json")
    assert there.returncode == 0, there.stderr
    there, here = (json.loads(result.stdout) for result in (there, here))
    assert there["files_sha256"] == here["files_sha256"]
    assert there["checkpoint"] == here["checkpoint"]


def test_steps_of_a_bucket_are_chosen_as_on_disk(bucket, run):
    (run.step / "commit_success.txt").unlink()
    shutil.copytree(run.folder, bucket.folder / "team" / "run")
    refused = bucket.merge_ckpt("plan", "--ckpt", "gs://experiments/team/run")
    assert refused.returncode == 2
    assert "no complete step (complete steps: none; incomplete: step 7: no commit_success.txt)" in refused.stderr
    assert "gs://experiments/team/run/checkpoints" in refused.stderr


def test_what_is_not_there_is_one_line(bucket):
    for path in ("gs://experiments/team/other", "gs://elsewhere/run"):
        refused = bucket.merge_ckpt("plan", "--ckpt", path)
        assert refused.returncode == 2
        [line] = [line for line in refused.stderr.splitlines() if line.startswith("merge-ckpt")]
        assert path in line


def test_other_schemes_are_refused():
    with pytest.raises(UserError, match=r"cannot read s3://\. Pass a local path or gs://"):
        open_location("s3://bucket/run")


def test_a_bucket_that_does_not_answer_is_given_up_within_seconds():
    environment = {**os.environ, "TENSORSTORE_GCS_HTTP_URL": "http://127.0.0.1:1", "GOOGLE_APPLICATION_CREDENTIALS": ""}
    command = [sys.executable, "-m", "portlab_merge", "plan", "--ckpt", "gs://experiments/run"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "gs://experiments/run: cannot list the bucket" in refused.stderr
