"""Results of other serving benchmarks in our terms: `docs/bench-import.md` holds their definitions beside ours."""

from pathlib import Path
from typing import Any

from portlab_bench.importers import aiperf, guidellm, inference_perf, vllm
from portlab_bench.importers.reading import Imported, read_documents
from portlab_spec.errors import UserError
from portlab_spec.files import sha256_file

__all__ = ["Imported", "import_file"]

TOOLS = {tool.TOOL: tool for tool in (vllm, guidellm, aiperf, inference_perf)}


def import_file(path: Path) -> Imported:
    """Read a result file; the tool is recognised by what is in it.

    Raises:
        UserError: missing, cut off, of no known tool or version, without requests, or at odds with itself.
    """
    documents = read_documents(path)
    for name, tool in TOOLS.items():
        if all(tool.recognises(document) for document in documents):
            return tool.read(documents, path, f"{name}: {path.name}, sha256 {sha256_file(path)[:16]}")
    raise UserError(
        f"is of no tool that is read here ({_shape(documents[0])})",
        where=str(path),
        fix=f"Give a result of: {', '.join(TOOLS)}",
    )


def _shape(document: Any) -> str:
    if not isinstance(document, dict):
        return f"a {type(document).__name__}"
    keys = sorted(document)
    return f"an object with {', '.join(keys[:5])}" + (", ..." if len(keys) > 5 else "") if keys else "an empty object"
