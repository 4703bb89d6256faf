"""The one entry to attention, on one device or on a mesh."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from portlab_jax.attention.blockwise import ACCELERATOR_STEP_BYTES, STEP_BYTES, Visible, block_sparse
from portlab_jax.attention.cudnn import cudnn_mask, cudnn_segment
from portlab_jax.attention.splash import splash_plain, splash_tree
from portlab_jax.mesh import axis_size, partition, shard

if TYPE_CHECKING:
    from portlab_spec.packing import Blocks, Rows


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: "Rows",
    blocks: "Blocks",
    *,
    window: int | None,
    scale: float,
    implementation: str = "xla",
) -> jax.Array:
    """Attention of packed rows: token i sees token j of its row if j <= i < ends[j].

    On a mesh every device attends within its own groups and heads; nothing is communicated.

    Args:
        q: (G, R, T, H, d), groups on ("data", "fsdp"), heads on "tp".
        k: (G, R, T, K, d); H is a multiple of K.
        v: (G, R, T, K, d).
        rows: ends and positions.
        blocks: which key blocks a query block needs; `sliding` is read if there is a window, else `full`.
        window: sliding attention: only j with positions[i] - positions[j] < window are seen.
        scale: of the scores.
        implementation: as `choose` names it.

    Returns:
        (G, R, T, H, d) in the dtype and sharding of q; at padding something finite.
    """
    table = blocks.full if window is None else blocks.sliding
    run = IMPLEMENTATIONS[implementation]

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *visible: jax.Array) -> jax.Array:
        q_NTHd, k_NTKd, v_NTKd, *merged = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, *visible))
        # The name is found again in the compiled program, whose kernels do not say what they see.
        with jax.named_scope(scope_name(implementation, window)):
            return run(q_NTHd, k_NTKd, v_NTKd, Visible(*merged), window=window, scale=scale).reshape(q.shape)

    arrays: tuple[jax.Array, ...] = (q, k, v, rows.ends, rows.positions, table)
    if jax.sharding.get_abstract_mesh().empty:
        return local(*arrays)
    divide = all(x.shape[3] % axis_size("heads") == 0 for x in (q, k))
    heads = ("group", None, None, "heads" if divide else None, None)
    axes = (heads, heads, heads, *(("group", None, None, None)[: x.ndim] for x in arrays[3:]))
    specs = tuple(partition(names, x.shape) for names, x in zip(axes, arrays, strict=True))
    arrays = tuple(shard(x, *names) for names, x in zip(axes, arrays, strict=True))
    # Loop carries start as constants, which the check of varying axes would want cast; nothing crosses devices here.
    return jax.shard_map(local, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)


def scope_name(implementation: str, window: int | None) -> str:
    """What attention is called in the names of a compiled program's instructions."""
    return f"attend_{implementation}_{window or 'full'}"


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, *, window: int | None, scale: float) -> jax.Array:
    # The mesh knows the device that is compiled for, which need not be one that is here.
    device = jax.sharding.get_abstract_mesh().abstract_device
    step_bytes = STEP_BYTES.get(device.platform if device else jax.default_backend(), ACCELERATOR_STEP_BYTES)
    return block_sparse(q, k, v, visible, window=window, scale=scale, step_bytes=step_bytes)


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": _xla,
    "splash": splash_plain,
    "splash_tree": splash_tree,
    "cudnn": cudnn_segment,
    "cudnn_mask": cudnn_mask,
}
