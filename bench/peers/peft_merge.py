"""Merge with PEFT, as its documentation has it.

    python peft_merge.py BASE ADAPTER OUT

OUT.json has the seconds without the imports, until the output is on disk.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from disk import put_on_disk
from peft import PeftModel


def main(base: Path, adapter: Path, out: Path) -> None:
    """Load the base in its own type, merge, save."""
    started = time.perf_counter()
    (architecture,) = json.loads((base / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
    put_on_disk(out)
    Path(f"{out}.json").write_text(json.dumps({"call_seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
