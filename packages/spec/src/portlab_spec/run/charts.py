"""The loss curve as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path

from portlab_spec.files import write_bytes


def loss_curve(path: Path, losses: Sequence[float], title: str) -> None:
    """Write a PNG of the loss of each step, on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, marker="o", markersize=3)
    axes.set(yscale="log", xlabel="step", ylabel="loss (nats per supervised token)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, which="both", alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    plt.close(figure)
    write_bytes(path, buffer.getvalue())
