"""Requests, figures and cells of a bench, made by hand."""

from collections.abc import Sequence

from portlab_bench import metrics
from portlab_bench.schema import Cell, CellFigures, RequestRecord


def record(index: int = 0, *, sent: float = 0.0, chunks: Sequence[float] = (), **more) -> RequestRecord:
    """A request that ends 0.1 s behind its last event, counted by the server."""
    settings = {"output_tokens": len(chunks), "tokens_from": "usage", "finish": "stop"}
    done = (chunks[-1] if chunks else sent) + 0.1
    return RequestRecord(index=index, sent=sent, chunks=tuple(chunks), **{**settings, "done": done, **more})


def figures(records: Sequence[RequestRecord] | None = None) -> CellFigures:
    """Figures of requests; by default of a hundred, sent when due, answered in 0.1 s."""
    made = [record(i, sent=i + 0.001, scheduled=float(i), chunks=(i + 0.1, i + 0.2)) for i in range(100)]
    found = metrics.figures(made if records is None else records, client_load=0.1, prefix_hits=0.5)
    assert found is not None
    return found


def cell(name: str, found: CellFigures | None, anchor: bool = False, **more) -> Cell:
    """A cell of an open loop."""
    settings = {"mode": "open", "arrivals": "poisson", "seed": 0, "processes": 1, "findings": ()}
    return Cell(name=name, figures=found, anchor=anchor, **{**settings, **more})
