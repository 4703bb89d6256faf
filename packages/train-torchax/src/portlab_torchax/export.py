"""What a run is for, as files that nothing of JAX is needed for, and the proof that plain PyTorch reads them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from portlab_hf.export import TOP_K
from portlab_hf.model import base_of, module_prefix
from portlab_spec.data.tokens import Row
from portlab_spec.models import find_prefix
from portlab_spec.packing import pack_batch
from portlab_spec.run.export import golden_logits
from portlab_spec.safetensors_file import open_tensors
from portlab_torchax.functional import Values
from portlab_torchax.setup import Setup


def probe(setup: Setup, trained: Values, row: Row) -> dict[str, Any]:
    """Golden logits of the trained model at the supervised positions of one row, for verification after export."""
    layout = setup.plan([[row] * setup.placement.groups]).layout(0)
    packed = pack_batch([row] * setup.placement.groups, layout)
    batch = setup.placement.put_rows(jax.tree.map(lambda x: x[0], packed))

    @jax.jit
    def top(trained: Values, frozen: Values, batch: Any) -> Any:
        values = setup.program.values(trained, frozen)
        logits = setup.program.logits(values, setup.program.supervised_hidden(values, batch))
        return jax.lax.top_k(logits, min(TOP_K, logits.shape[-1]))

    found, ids = (np.asarray(x)[0] for x in top(trained, setup.frozen, batch))
    held = packed.weights[0, 0] > 0
    order = np.argsort(packed.slots[0, 0][held], kind="stable")
    return golden_logits(row, ids[held][order], found[held][order])


def sources(setup: Setup, trained: Values) -> dict[str, Callable[[], np.ndarray]]:
    """All trained weights by their names in the base's files."""
    names = stored_names(setup)
    return {names[name]: partial(np.asarray, value) for name, value in trained.items()}


def as_stored(setup: Setup, trained: Values) -> Values:
    """All trained weights rounded as the base's files will hold them, in the type of training.

    Those that a program rounds likewise where it uses them are given as they are: a copy of all would not fit.
    """
    names, tensors = stored_names(setup), open_tensors(setup.model.path)

    def rounded(name: str, value: jax.Array) -> jax.Array:
        found = tensors.get(names[name])
        if found is None or found.dtype in (value.dtype, setup.program.dtype):
            return value
        return value.astype(found.dtype).astype(value.dtype)

    return {name: rounded(name, value) for name, value in trained.items()}


def stored_names(setup: Setup) -> dict[str, str]:
    """Names in the base's files of what is trained: they may have another prefix than the model's code."""
    own = module_prefix(base_of(setup.program.model.module))
    stored = find_prefix(open_tensors(setup.model.path), str(setup.model.path))
    return {name: stored + name.removeprefix(own) if name.startswith(own) else name for name in setup.trained}
