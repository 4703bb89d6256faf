"""What backends are compared by: the work that each is given, and the evidence that each leaves. Files on disk, since
the backends' libraries cannot share an environment."""

from portlab_spec.evidence.places import Place, find_places, probe_columns
from portlab_spec.evidence.record import About, Evidence
from portlab_spec.evidence.work import Work, read_work, row_digest, write_work

__all__ = [
    "About",
    "Evidence",
    "Place",
    "Work",
    "find_places",
    "probe_columns",
    "read_work",
    "row_digest",
    "write_work",
]
