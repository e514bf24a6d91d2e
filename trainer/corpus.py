"""Text to train on that every machine has: the source of Python's own standard library.

It is real text, some 12 MB, and needs no network. Its files, one after the other, are written once
into a cache folder and mapped from there; a folder of a user's own is joined in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import stat
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..topology.errors import InputError, input_error

FIELD = "training.data"
SEPARATOR = b"\n"
"""Stands between two documents."""
ENDING = ".bytes"
"""Of the files in the cache; none of `USER_SUFFIXES`, so a cache inside a user's folder is no part of it."""
USER_SUFFIXES = frozenset({".txt", ".md", ".py", ".rst", ".json", ".jsonl"})
# Tests hold generated tables and broken text; packages beside the library differ from one machine to the next.
_NOT_SOURCE = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One file of a corpus.

    Attributes:
        name: Relative path with forward slashes, by which the files are sorted.
        mtime_ns: When it was last written, in nanoseconds.
    """

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


def standard_library(cache: Path | None = None, root: Path | None = None) -> Path:
    """The file that holds the source of Python's standard library, written where it is not there yet.

    Its name carries the Python version and a digest of the relative paths and sizes, so another
    Python, or a patched one, makes another file.

    Args:
        cache: The folder it is kept in; left out: that of `cache_folders`.
        root: The library's folder; left out: that of the Python that runs.

    Raises:
        InputError: If there is no source, or no folder it can be written into.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    documents = listing(root, frozenset({".py"}), _NOT_SOURCE)  # what cannot be read of it is left out
    digest = _digest([(document.name, document.size_bytes) for document in documents])
    python = f"{sys.implementation.name}-{platform.python_version()}"
    whose = f"the source of Python's standard library in {root}"
    none = f"{whose} has no file that can be read; name a text or token file"
    return _joined(documents, f"{python}-{digest}{ENDING}", cache, none, strict=False)


def folder_text(root: Path, cache: Path | None = None) -> Path:
    """The file that holds all text files below a folder, written anew where one of them changed.

    Raises:
        InputError: If there is none, one cannot be read, or no folder it can be written into.
    """
    documents = listing(root, USER_SUFFIXES, strict=True)
    # The folder's own path is in the digest: two checkouts may agree in every relative path, size and time.
    facts = [(str(root.resolve()), 0, 0)]
    facts += [(document.name, document.size_bytes, document.mtime_ns) for document in documents]
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", root.resolve().name)[:40].strip("-") or "folder"
    endings = " ".join(sorted(USER_SUFFIXES))
    none = f"{root}: holds no text in files that end in {endings}; name a file where it ends otherwise"
    return _joined(documents, f"{label}-{_digest(facts)}{ENDING}", cache, none, strict=True)


def listing(
    root: Path, suffixes: frozenset[str], skipped: frozenset[str] = frozenset(), *, strict: bool = False
) -> list[Document]:
    """The files below a folder with one of the endings, by relative path; links to folders are not followed.

    Args:
        suffixes: In lower case, with their dot.
        skipped: Names of folders that are not entered, at any depth.
        strict: Whether what cannot be read is an error; else it is left out.

    Raises:
        InputError: If ``strict`` and a file or folder cannot be read.
    """

    def lost(error: OSError) -> None:
        if strict:
            raise _unreadable(error.filename, error) from None

    documents = []
    for folder, folders, names in os.walk(root, onerror=lost):
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            path = Path(folder, name)
            if path.suffix.lower() not in suffixes:
                continue
            try:
                facts = path.stat()
            except OSError as error:  # a link to nowhere, or gone since
                lost(error)
                continue
            if stat.S_ISREG(facts.st_mode):  # a pipe would be waited for
                name_below = path.relative_to(root).as_posix()
                documents.append(Document(name_below, path, facts.st_size, facts.st_mtime_ns))
    return sorted(documents, key=lambda document: document.name)


def cache_folders() -> tuple[Path, ...]:
    """Where joined text is kept, the first that can be written into: the user's cache, then a temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folders = []
    if Path(base).is_absolute():  # else it is to be ignored, says the XDG specification
        folders.append(Path(base) / "exatwin")
    else:
        with contextlib.suppress(RuntimeError):  # a user without a home
            folders.append(Path.home() / ".cache" / "exatwin")
    return (*folders, Path(tempfile.gettempdir()) / f"exatwin-{os.getuid()}")


def _joined(documents: Sequence[Document], name: str, cache: Path | None, none: str, *, strict: bool) -> Path:
    """The documents in one file of that name; the first cache folder that has it or takes it."""
    folders = (cache,) if cache is not None else cache_folders()
    failures = []
    for folder in folders:
        target = folder / name
        try:
            folder.mkdir(mode=0o777 if cache is not None else 0o700, parents=True, exist_ok=True)
            if cache is None and folder == folders[-1] and not _is_ours(folder):
                failures.append(f"{folder}: belongs to another user")  # who could put any file there
                continue
            if not _is_whole(target) and not _write(documents, target, strict):
                raise input_error(none, field=FIELD)
        except OSError as error:
            failures.append(f"{folder}: {error.strerror or error}")
        else:
            return target
    raise input_error(f"no cache folder can be written into: {'; '.join(failures)}", field=FIELD)


def _write(documents: Sequence[Document], target: Path, strict: bool) -> bool:
    """Put the documents where none can see them half written; whether there was a byte to write.

    Processes that write the same at once each write a draft of their own, and the first one stays: on a
    network file system, replacing a file takes it from under those who have mapped it.
    """
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with draft.open("xb") as output:
            for document in documents:
                between = SEPARATOR if output.tell() else b""
                for chunk in _chunks(document.path, strict):
                    output.write(between + chunk)
                    between = b""
            if not output.tell():
                return False
            output.flush()
            os.fsync(output.fileno())
        try:
            target.hardlink_to(draft)  # fails where another was first
        except OSError:
            if not _is_whole(target):  # a file system without links, or what a crash left
                draft.replace(target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return True


def _is_whole(target: Path) -> bool:
    """Whether the file was written; only a crash of the machine leaves an empty one."""
    return target.is_file() and target.stat().st_size > 0


def _chunks(path: Path, strict: bool, size_bytes: int = 2**20) -> Iterator[bytes]:
    """What a file holds, piece by piece; where not ``strict``, as far as it can be read."""
    try:
        with path.open("rb") as source:
            while chunk := source.read(size_bytes):
                yield chunk
    except OSError as error:
        if strict:
            raise _unreadable(path, error) from None


def _unreadable(path: Path | str, error: OSError) -> InputError:
    return input_error(f"{path}: cannot be read: {error.strerror or error}", field=FIELD)


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder of this user, and no link to elsewhere."""
    facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()


def _digest(facts: Sequence[tuple[str | int, ...]]) -> str:
    """A short digest of names and numbers; a name is in the bytes of the file system, whatever they decode to."""
    text = hashlib.sha256()
    for fact in facts:
        text.update(b"\0".join(os.fsencode(str(value)) for value in fact) + b"\n")
    return text.hexdigest()[:12]
