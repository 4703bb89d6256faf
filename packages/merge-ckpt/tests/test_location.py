"""Checkpoints in a bucket are read where they lie: TensorStore's own driver against a server that speaks GCS."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gcp_storage_emulator.server import create_server

from portlab_merge.location import open_location
from portlab_spec.errors import UserError

UPLOAD = """
import sys, tensorstore
from pathlib import Path
bucket = tensorstore.KvStore.open({"driver": "gcs", "bucket": "experiments"}).result()
root = Path(sys.argv[1])
for file in root.rglob("*"):
    if file.is_file():
        bucket.write(f"team/{root.name}/{file.relative_to(root)}", file.read_bytes()).result()
"""


@dataclass(frozen=True)
class Bucket:
    """gs://experiments, on a server of its own."""

    url: str

    def run(self, *command: Any) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TENSORSTORE_GCS_HTTP_URL": self.url, "GOOGLE_APPLICATION_CREDENTIALS": ""}
        return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=120)

    def upload(self, folder: Path) -> None:
        assert self.run(sys.executable, "-c", UPLOAD, folder).returncode == 0

    def merge_ckpt(self, *arguments: Any) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "portlab_merge", *arguments)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="experiments")
    server.start()
    host, port = server._api._httpd.server_address
    yield Bucket(f"http://{host}:{port}")
    server.stop()


@pytest.mark.parametrize("layout", [{}, {"ocdbt": False}, {"ocdbt": False, "zarr3": True}])
def test_a_run_in_a_bucket_merges_to_the_same_bytes(
    bucket, base, make_tree, describe, save, command: Callable[..., Any], tmp_path, layout
):
    tree = make_tree(base)
    save(tmp_path / "run" / "checkpoints", tree, describe(base, tree), **layout)
    bucket.upload(tmp_path / "run")
    there = bucket.merge_ckpt("merge", "--ckpt", "gs://experiments/team/run", "--out", tmp_path / "there", "--json")
    here = command("merge", "--ckpt", tmp_path / "run", "--out", tmp_path / "here", "--json")
    assert there.returncode == 0, there.stderr
    there, here = (json.loads(result.stdout) for result in (there, here))
    assert there["files_sha256"] == here["files_sha256"]
    assert there["checkpoint"] == here["checkpoint"]


def test_steps_of_a_bucket_are_chosen_as_on_disk(bucket, run):
    (run.step / "commit_success.txt").unlink()
    bucket.upload(run.folder)
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
