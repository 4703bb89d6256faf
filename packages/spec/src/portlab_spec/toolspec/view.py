"""Terminal views: segments with their mask, findings, metrics. Pure: they return what rich prints."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from portlab_spec.formats import Encoded, Segment
from portlab_spec.metrics import Metric
from portlab_spec.tools import Finding

LEARNT, CONTROL, PLAIN = "black on green", "cyan", ""
LEARNT_CONTROL = "bold black on bright_green"
LEGEND = Text.assemble(
    (" learnt ", LEARNT),
    " ",
    (" learnt control token ", LEARNT_CONTROL),
    " ",
    ("control token", CONTROL),
    "  not learnt",
)


def segments_view(segments: Iterable[Segment]) -> Text:
    """Segments as one text, what carries loss on green; line ends and edge spaces are drawn."""
    out = Text()
    for segment in segments:
        style = {
            (False, False): PLAIN,
            (False, True): CONTROL,
            (True, False): LEARNT,
            (True, True): LEARNT_CONTROL,
        }[segment.loss, segment.control]
        out.append(segment.text.replace("\n", "↵\n") if segment.loss else segment.text, style)
    return out


def mask_summary(encoded: Encoded, segments: Sequence[Segment]) -> Text:
    """Counts, and what is learnt run by run: the mask without colours."""
    learnt = sum(encoded.loss)
    share = learnt / len(encoded.ids)
    out = Text(f"{len(encoded.ids)} tokens, {learnt} learnt ({share:.1%})")
    if not learnt:
        out.append("  NOTHING IS LEARNT", "bold red")
    for run in learnt_runs(segments):
        out.append("\n  learnt: ", "dim")
        out.append(repr(run)[1:-1], "green")
    return out


def learnt_runs(segments: Iterable[Segment]) -> list[str]:
    """Maximal runs of text that carry loss."""
    runs: list[str] = []
    before = False
    for segment in segments:
        if segment.loss and before:
            runs[-1] += segment.text
        elif segment.loss:
            runs.append(segment.text)
        before = segment.loss
    return runs


def findings_view(findings: Sequence[Finding]) -> Text:
    """One finding after the other."""
    out = Text()
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "yellow"
        out.append(f"{finding.severity:8}", style)
        out.append(f"{finding.where}", "bold")
        out.append(f"  {finding.code}\n        {finding.what}\n        ")
        out.append(f"{finding.fix}\n", "green")
        out.append(f"        in {', '.join(finding.formats)}\n", "dim")
    return out


def metrics_view(metrics: Mapping[str, Metric]) -> Table:
    """A table of shares with counts and intervals; strict and lenient side by side."""
    table = Table("metric", "value", "95 % interval", "hits / count", "lenient")
    for name, metric in metrics.items():
        if name.endswith("_lenient"):
            continue
        lenient = metrics.get(f"{name}_lenient")
        table.add_row(
            name,
            f"{metric.value:.1%}",
            f"{metric.low:.1%} to {metric.high:.1%}",
            f"{metric.hits} / {metric.count}",
            "" if lenient is None else f"{lenient.value:.1%}",
        )
    return table
