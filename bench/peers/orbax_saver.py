"""Save an adapter as a trainer on eight devices does.

    python orbax_saver.py RUN

Reads RUN/leaves.npz (`<target>/{a,b}`) and RUN/metadata.json and leaves RUN/checkpoints/1, in which every device has
written its part of the middle axis of each leaf.
"""

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec


def main(run: Path) -> None:
    """Save step 1."""
    mesh = jax.make_mesh((8,), ("fsdp",))
    placed = NamedSharding(mesh, PartitionSpec(None, "fsdp", None))
    tree: dict[str, dict[str, jax.Array]] = {}
    with np.load(run / "leaves.npz") as leaves:
        for name in leaves.files:
            target, side = name.rsplit("/", 1)
            tree.setdefault(target, {})[side] = jax.device_put(leaves[name], placed)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(run.absolute() / "checkpoints", options=options, item_names=("adapter",)) as manager:
        manager.save(
            1,
            args=ocp.args.Composite(adapter=ocp.args.StandardSave({"lora": tree})),
            custom_metadata=json.loads((run / "metadata.json").read_text()),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
