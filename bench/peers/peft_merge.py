"""Merge with PEFT, as its documentation has it.

python peft_merge.py BASE ADAPTER OUT
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from peft import PeftModel


def main(base: Path, adapter: Path, out: Path) -> None:
    """Load the base in its own type, merge, save."""
    (architecture,) = json.loads((base / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
