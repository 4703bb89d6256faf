"""Decoding on XLA: python xla_decoding.py MODEL PROMPTS.json prints the ids and how often it compiled.

PROMPTS.json: {"sets": [[[id]]], "stop": [id], "new": int, "batch": int}; the sets are decoded one after the other.
"""

import json
import os
import sys
from pathlib import Path

from portlab_xla import devices


def main(model: Path, file: Path) -> None:
    """Decode every set of prompts with an adapter that adds nothing."""
    devices.set_environment("xla", os.environ)
    from portlab_spec.assets import ModelFolder
    from portlab_spec.recipe import Recipe
    from portlab_xla.decode import Decoder
    from portlab_xla.setup import set_up

    asked = json.loads(file.read_text())
    setup = set_up(Recipe(max_length=256), ModelFolder(model, "toy", None), (), "xla")
    decoder = Decoder(setup, asked["stop"], asked["new"])
    ids, compiled = [], []
    for prompts in asked["sets"]:
        ids.append(decoder(prompts, batch_size=asked["batch"]))
        compiled.append(setup.device.compilations())
    print(json.dumps({"ids": ids, "compiled": compiled}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
