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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor, distribute_tensor

from ..topology.errors import InputError, input_error

DESCRIPTION = "exatwin.json"
FORMAT = 1
KEPT = 2  # whole checkpoints that stay; older ones go once a newer one is whole
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Progress:
    """What a run needs beside its tensors to go on.

    Attributes:
        step: Steps done.
        updates: Of the weights; fewer than steps where fp16 overflowed.
        seed: Of weights and data.
        loss_scale: Of fp16, and how many steps it was good for.
        good_steps: Likewise.
        data: Fingerprint of the data.
        model: The model's fields.
        training: Batch and sequence, which order the data.
    """

    step: int
    updates: int
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


def clear_partial(folder: Path) -> None:
    """Remove what a run left half-written; nobody may be writing there."""
    for left in folder.glob("step-*.partial"):
        shutil.rmtree(left, ignore_errors=True)


class _Writer(FileSystemWriter):
    """Writes from copies of its own: torch's staging fails for some DTensors that are views of a buffer."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies of all tensors in the host's memory."""
        return {name: _copied(tensor) for name, tensor in state_dict.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    held = tensor.to_local().detach()
    placed = DTensor.from_local(
        held, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    placed._local_tensor = held.to("cpu", copy=True)  # the mesh stays that of the devices, as in torch's own staging
    return placed


class Saver:
    """Writes checkpoints of one rank's part; every rank has one and calls it at the same steps.

    Args:
        folder: Where checkpoints lie.
        rank: This rank; rank 0 writes the description and renames.
        group: A process group of its own, as torch writes in a thread beside the training.
    """

    def __init__(self, folder: Path, rank: int, group: Any) -> None:
        self._folder, self._rank, self._group = folder, rank, group
        # Two threads that use one group need not do so in the same order on all ranks.
        self._polls = None if group is None else dist.new_group(backend="gloo")
        self._pending: tuple[Future[Any], Path, Progress] | None = None
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            clear_partial(folder)
        if group is not None:
            dist.barrier(group)

    def begin(self, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """Begin to write; the tensors are copied before this returns."""
        self.finish()
        path = self._folder / f"step-{progress.step:08d}.partial"
        future = dcp.async_save(
            dict(tensors),
            storage_writer=_Writer(path, sync_files=True, overwrite=True),
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
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self._polls)
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
            raise OSError(
                f"the checkpoint {path.with_suffix('').name} could not be written: {_cause(problem)}"
            ) from problem

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
            going = old.with_name(f"{old.name}.partial")  # what is half removed is never taken for whole
            old.replace(going)
            shutil.rmtree(going, ignore_errors=True)


def _cause(error: BaseException) -> str:
    """One line for people, of what the first rank that failed met."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = [text.strip() for text in str(error).splitlines() if text.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


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
        sizes = {Path(name).name: int(size) for name, size in document["files"].items()}
        progress = Progress(**{name: document[name] for name in Progress.__dataclass_fields__})
        _check_types(progress)
    except FileNotFoundError:
        raise input_error(f"is no checkpoint: it has no {DESCRIPTION}", where=where) from None
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise input_error(f"{DESCRIPTION} cannot be read: {type(error).__name__}: {error}", where=where) from None
    for name, size in sizes.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes in place of {size}"
            raise input_error(
                f"the checkpoint is damaged: {name} {what}; remove it, and the run goes on from the one before",
                where=where,
            )
    return progress


def _check_types(progress: Progress) -> None:
    kinds = {int: ("step", "updates", "seed", "good_steps"), str: ("data",), dict: ("model", "training")}
    for kind, names in kinds.items():
        for name in names:
            if type(getattr(progress, name)) is not kind:
                raise TypeError(f"{name} is no {kind.__name__}")
    if not 0 < float(progress.loss_scale) < float("inf") or min(progress.step, progress.updates) < 0:
        raise ValueError("a count or the loss scale is out of range")


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
            raise pickle.UnpicklingError("it is none")
        for info in metadata.storage_data.values():
            name = str(info.relative_path)
            if Path(name).name != name:
                raise pickle.UnpicklingError(f"{name} is no file of the checkpoint's")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Tensors only: what else an index may name would be read by pickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Nothing of this kind is in a checkpoint."""
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")


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
        with torch.no_grad():
            dcp.load(wanted, storage_reader=reader, planner=_Planner(), process_group=group, no_dist=group is None)
    except (Exception, CheckpointException) as error:
        raise input_error(f"the checkpoint cannot be read: {_cause(error)}", where=str(path)) from None
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
