"""Checkpoints: torch's distributed ones, written beside the training, whole or not at all.

A checkpoint is a folder ``step-N``. It is written as ``step-N.partial`` and renamed once every rank's file and the
description are on disk, so that a run that is killed at any moment leaves the last whole one. Each parameter is stored
under its name in the whole model, as its fp32 value and Adam's two moments, so that another layout can take it up.
Loading reads tensors only: the index that torch writes as a pickle is read by an unpickler that knows the few
classes it is made of, and refuses all others.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from ..topology.errors import input_error

DESCRIPTION = "exatwin.json"
FORMAT = 1
KEPT = 2  # whole checkpoints that stay; older ones go once a newer one is whole
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Progress:
    """What a run needs beside its tensors to go on.

    Attributes:
        step: Steps done.
        seed: Of weights and data.
        loss_scale: Of fp16, and how many steps it was good for.
        good_steps: Likewise.
        data: Fingerprint of the data.
        model: The model's fields.
        training: Batch and sequence, which order the data.
    """

    step: int
    seed: int
    loss_scale: float
    good_steps: int
    data: str
    model: dict[str, Any]
    training: dict[str, Any]


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


class Saver:
    """Writes checkpoints of one rank's part; every rank has one and calls it at the same steps.

    Args:
        folder: Where checkpoints lie.
        rank: This rank; rank 0 writes the description and renames.
        group: A process group of its own, as torch writes in a thread beside the training.
    """

    def __init__(self, folder: Path, rank: int, group: Any) -> None:
        self._folder, self._rank, self._group = folder, rank, group
        self._pending: tuple[Future[Any], Path, Progress] | None = None
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("step-*.partial"):
                shutil.rmtree(left, ignore_errors=True)
        if group is not None:
            dist.barrier(group)

    def begin(self, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """Begin to write; the tensors are copied before this returns."""
        self.finish()
        path = self._folder / f"step-{progress.step:08d}.partial"
        future = dcp.async_save(
            dict(tensors),
            storage_writer=FileSystemWriter(path, sync_files=True, overwrite=True),
            process_group=self._group,
        )
        self._pending = cast("Future[Any]", future), path, progress

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None and not self._pending[0].done()

    def poll(self) -> None:
        """Take note of a checkpoint that is written; all ranks call it at the same steps."""
        if self._pending is None:
            return
        done = torch.tensor([int(self._pending[0].done())])
        if self._group is not None:
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self._group)
        if int(done):
            self.finish()

    def finish(self) -> None:
        """Wait until a checkpoint that is being written is whole.

        Raises:
            OSError: If it cannot be written; the one before it stays the last.
        """
        if self._pending is None:
            return
        future, path, progress = self._pending
        self._pending = None
        problem: BaseException | None = None
        try:
            future.result()
        except BaseException as error:
            problem = error
        if problem is None and self._rank == 0:
            try:
                self._publish(path, progress)
            except OSError as error:
                problem = error
        if problem is not None:
            if self._rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            reason = str(problem).strip().splitlines()[-1] if str(problem).strip() else type(problem).__name__
            raise OSError(f"the checkpoint {path.with_suffix('').name} could not be written: {reason}") from problem

    def _publish(self, path: Path, progress: Progress) -> None:
        sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
        text = json.dumps({"format": FORMAT, "files": sizes, **asdict(progress)}, indent=2)
        with (path / DESCRIPTION).open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        whole = path.with_suffix("")
        if whole.exists():
            shutil.rmtree(whole)
        path.replace(whole)
        _sync(self._folder)
        for old in checkpoints(self._folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_progress(path: Path) -> Progress:
    """The description of a checkpoint.

    Raises:
        InputError: If it is missing, broken, or a file is missing or cut short.
    """
    where = str(path)
    try:
        document = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise input_error(f"has format {document['format']}; this version reads {FORMAT}", where=where)
        sizes = document["files"]
        fields = {name: document[name] for name in Progress.__dataclass_fields__}
    except FileNotFoundError:
        raise input_error(f"is no checkpoint: it has no {DESCRIPTION}", where=where) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise input_error(f"{DESCRIPTION} cannot be read: {type(error).__name__}: {error}", where=where) from None
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes in place of {size}"
            raise input_error(f"the checkpoint is damaged: {name} {what}", where=where)
    return Progress(**fields)


_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "StorageMeta"},
    "torch": {"Size", "float32", "float16", "bfloat16", "device"},
    "torch.serialization": {"_get_layout"},
    "torch._C": {"_LinAlgError"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "Path"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index that torch wrote, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the few classes that an index is made of."""
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")


class _Reader(FileSystemReader):
    """Reads a checkpoint whose index is not trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, from the classes that it may be made of."""
        data = (Path(self.path) / ".metadata").read_bytes()
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("is no index")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = self.storage_meta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def load(path: Path, tensors: dict[str, torch.Tensor], group: Any) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, in the places that this layout has for them.

    A vocabulary that another layout padded otherwise is cut or filled up.

    Args:
        path: The checkpoint, found whole by `read_progress`.
        tensors: This rank's tensors by name, as `Replicas.state` gives them; they are written over.
        group: The process group that reads together; None for one rank.

    Raises:
        InputError: If it is of another model, or cannot be read.
    """
    reader = _Reader(path)
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise input_error(f"the checkpoint's index cannot be read: {error}", where=str(path)) from None
    wanted: dict[str, torch.Tensor] = {}
    refilled: list[str] = []
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise input_error(f"is of another model: it has no {name.partition('.')[2]}", where=str(path))
        if tuple(entry.size) == tuple(tensor.shape):
            wanted[name] = tensor
        elif (
            name.endswith(("embedding.words", "head.words", "head.bias"))
            and tuple(entry.size)[1:] == tuple(tensor.shape)[1:]
        ):
            wanted[name] = torch.zeros(tuple(entry.size), dtype=torch.float32)
            refilled.append(name)
        else:
            there, here = "x".join(map(str, entry.size)), "x".join(map(str, tensor.shape))
            raise input_error(
                f"is of another model: {name.partition('.')[2]} is {there} there and {here} here", where=str(path)
            )
    try:
        dcp.load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise input_error(
            f"the checkpoint cannot be read: {type(error).__name__}: {reason[-1] if reason else ''}", where=str(path)
        ) from None
    for name in refilled:
        wanted[name] = _refilled(wanted[name], tensors[name])
    return wanted


def _refilled(stored: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows of a vocabulary, with as many at the end as this layout pads it to."""
    whole = torch.zeros(tuple(like.shape), dtype=stored.dtype)
    rows = min(whole.shape[0], stored.shape[0])
    whole[:rows] = stored[:rows]
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
