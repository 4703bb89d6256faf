"""The packed batches of a run, one after the other, from wherever a checkpoint stood."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import grain

from portlab_spec.data.tokens import Row
from portlab_spec.errors import UserError
from portlab_spec.packing.batch import Batch, Layout, pack_batch
from portlab_spec.packing.order import BatchOrder
from portlab_spec.packing.planning import Plan


class Step(NamedTuple):
    """What one step computes.

    Attributes:
        number: of the step, from 0.
        rows: its rows, before packing.
        layout: static shape of the batch.
        batch: the arrays.
    """

    number: int
    rows: list[Row]
    layout: Layout
    batch: Batch


class PackedBatches[T](Iterator[T]):
    """The steps of a run; a thread packs and prepares ahead while the devices compute.

    This is a grain pipeline over `BatchOrder`, whose state is the number of the next step that was not handed out,
    whatever was packed ahead. grain does not look at what it reads, so the state also holds what decides which rows a
    step gets; `set_state` refuses another run's.

    Args:
        order: rows of each step.
        plan: made of these steps.
        prepare: what to hand out for a step, never None; may move its batch to the devices.
        ahead: batches that wait, at most.
    """

    def __init__(self, order: BatchOrder, plan: Plan, prepare: Callable[[Step], T], *, ahead: int = 2) -> None:
        def pack(number: int) -> T:
            rows, layout = order[number], plan.layout(number)
            return prepare(Step(number, rows, layout, pack_batch(rows, layout)))

        self._order, self._digest = order, order.digest()
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
        self._steps: grain.DatasetIterator[T] = iter(
            grain.MapDataset.range(len(order)).map(pack).to_iter_dataset(options)
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return next(self._steps)

    def get_state(self) -> dict[str, Any]:
        """Where the iterator stands, as JSON, for `set_state` in a later process."""
        return {"grain": self._steps.get_state(), "sha256": self._digest, **self._settings()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `get_state` stood; the number of steps may have changed.

        Raises:
            UserError: the state is of other rows, or of another order of them.
        """
        for name, now in self._settings().items():
            if name != "rows" and state[name] != now:
                raise UserError(
                    f"{name} is {now}, and the checkpoint was written with {state[name]}",
                    fix="Set it back, or start another run",
                )
        if state["sha256"] != self._digest:
            raise UserError(
                "the training rows differ from those the checkpoint was written with "
                f"({state['rows']} rows then, {len(self._order.rows)} now)",
                fix="Train on the rows that the run began with, or start another run",
            )
        self._steps.set_state(state["grain"])

    def _settings(self) -> dict[str, Any]:
        order = self._order
        return {
            "rows": len(order.rows),
            "batch_size": order.batch_size,
            "seed": order.seed,
            "group_by_prefix": order.group_by_prefix,
        }
