"""Checkpoints: another layout goes on from them, a kill leaves the last whole one, and nothing in them is executed."""

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from exatwin.topology.errors import InputError, RunError
from exatwin.trainer import checkpoint as module
from exatwin.trainer.checkpoint import DESCRIPTION, Progress, Saver, checkpoints, load, read_progress

from .small_runs import run, small, text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning", "ignore:Detected pickle:UserWarning")

CLOSE = 1e-5
ALL, HALF = 4, 2
MOE = ("model.experts=4", "model.top_k=2", "model.bias=false", "model.tied=false")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What all runs here read."""
    return text(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def unbroken(data):
    """Losses of one process without a checkpoint."""
    return run(small(), data, ALL)[0]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory, data, unbroken):
    """Checkpoints at half the run, one a layout, made when they are first asked for."""
    made = {}

    def at(scenario):
        key = str(scenario.document())
        if key not in made:
            made[key] = tmp_path_factory.mktemp("half")
            run(scenario, data, HALF, checkpoint=made[key])
        return made[key]

    return at


def resumed(folder, scenario, data, tmp_path, **options):
    """Losses of the second half; the checkpoint stays for others."""
    mine = tmp_path / "checkpoint"
    shutil.copytree(folder, mine)
    return run(scenario, data, ALL, checkpoint=mine, **options)[0]


TENSOR_PIPELINE = {"tp": 2, "pp": 2}
CHANGES = {
    "tp2 x pp2 -> dp4": (TENSOR_PIPELINE, {"dp": 4}),
    "tp2 x pp2 -> one": (TENSOR_PIPELINE, {}),
    "tp2 x pp2 -> zero 3": (TENSOR_PIPELINE, {"dp": 2, "zero": 3}),
    "tp2 x pp2 -> tp4": (TENSOR_PIPELINE, {"tp": 4}),
    "zero 1 -> zero 3 x tp2": ({"dp": 2, "zero": 1}, {"dp": 2, "tp": 2, "zero": 3}),
    "zero 3 x tp2 -> zero 1": ({"dp": 2, "tp": 2, "zero": 3}, {"dp": 2, "zero": 1}),
    "one -> interleaved zero 2": ({}, {"pp": 2, "vpp": 2, "dp": 2, "zero": 2}),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_another_layout_goes_on_with_the_same_losses(before, after, data, unbroken, halfway, tmp_path):
    """In fp32, the head tied to the embedding, and a vocabulary that each tensor width pads otherwise."""
    losses = resumed(halfway(small(**before)), small(**after), data, tmp_path)
    assert losses == pytest.approx(unbroken[HALF:], abs=CLOSE)


@pytest.mark.parametrize("after", [{"dp": 2, "ep": 1}, {}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_experts_move_to_other_ranks(after, data, halfway, tmp_path):
    """Two ranks with half of the experts each, then all of them on each, on one, or cut."""
    whole = run(small(*MOE), data, ALL)[0]
    losses = resumed(halfway(small(*MOE, dp=2, ep=2)), small(*MOE, **after), data, tmp_path)
    assert losses == pytest.approx(whole[HALF:], abs=CLOSE)


def test_bf16_goes_on_from_its_fp32_weights(data, halfway, tmp_path):
    """In the same layout to the bit; in another within bf16's rounding, and not further off each step."""
    bf16 = small("training.precision=bf16", dp=2, zero=1)
    whole = run(bf16, data, ALL)[0]
    folder = halfway(bf16)
    assert resumed(folder, bf16, data, tmp_path) == whole[HALF:]
    other = small("training.precision=bf16", tp=2)
    assert resumed(folder, other, data, tmp_path / "other") == pytest.approx(whole[HALF:], abs=1e-2)


def test_fp16_goes_on_with_its_loss_scale_and_its_count_of_updates(data, tmp_path):
    """Skipped steps are steps of the data, but none of Adam's."""
    fp16 = small("training.precision=fp16")
    run(fp16, data, HALF, checkpoint=tmp_path)
    progress = read_progress(checkpoints(tmp_path)[-1])
    assert progress.step == HALF
    assert progress.updates <= HALF
    assert progress.loss_scale == 2.0 ** (16 - (HALF - progress.updates))
    losses = run(fp16, data, ALL, checkpoint=tmp_path)[0]
    assert losses == run(fp16, data, ALL)[0][HALF:]


def test_checkpoints_beside_the_training_change_nothing(data, unbroken, tmp_path):
    """Written while the weights go on changing, they are still those of their step; two stay."""
    losses, _ = run(small(dp=2), data, ALL, checkpoint=tmp_path, checkpoint_every=1)
    assert losses == pytest.approx(unbroken, abs=CLOSE)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert not list(tmp_path.glob("*.partial"))
    shutil.rmtree(tmp_path / "step-00000004")
    assert run(small(dp=2), data, ALL, checkpoint=tmp_path)[0] == pytest.approx(unbroken[3:], abs=CLOSE)


def a_progress(step=1):
    return Progress(step, step, 0, 1.0, 0, "", {}, {})


def test_what_is_written_is_what_was_when_it_began(tmp_path):
    """Without any process group; the tensor changes right after."""
    saver = Saver(tmp_path, 0, None)
    tensor = torch.arange(1000.0)
    saver.begin({"weight.x": tensor}, a_progress())
    tensor.zero_()
    saver.finish()
    (path,) = checkpoints(tmp_path)
    read_progress(path)
    assert torch.equal(load(path, {"weight.x": tensor}, None)["weight.x"], torch.arange(1000.0))


def test_a_folder_is_whole_or_no_checkpoint(tmp_path):
    """What a killed run left is neither taken up nor kept."""
    (tmp_path / "step-00000007.partial").mkdir()
    (tmp_path / "notes").mkdir()
    assert checkpoints(tmp_path) == []
    Saver(tmp_path, 0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


# --- damage, and malice -----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of one tensor."""
    saver = Saver(tmp_path, 0, None)
    saver.begin({"weight.x": torch.arange(64.0)}, a_progress())
    saver.finish()
    return checkpoints(tmp_path)[-1]


class Malice:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def describe(folder):
    """What an attacker does too: make the sizes right."""
    document = json.loads((folder / DESCRIPTION).read_text())
    document["files"] = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != DESCRIPTION}
    (folder / DESCRIPTION).write_text(json.dumps(document))


def refused(folder):
    """Its message, on one line."""
    with pytest.raises(InputError) as raised:
        read_progress(folder)
        load(folder, {"weight.x": torch.zeros(64)}, None)
    message = str(raised.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


@pytest.mark.parametrize("of", [Malice, lambda path: {"index": Malice(path)}], ids=["itself", "within"])
def test_a_malicious_index_is_refused_and_not_executed(of, saved, tmp_path):
    """The index is a pickle, which could call anything."""
    witness = tmp_path / "witness"
    (saved / ".metadata").write_bytes(pickle.dumps(of(witness)))
    describe(saved)
    assert "has no place in a checkpoint's index" in refused(saved)
    assert not witness.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.load", "torch.hub.load", "collections.Counter"])
def test_an_index_may_name_few_classes(name, saved):
    """Even where it calls none."""
    owner, _, attribute = name.rpartition(".")
    (saved / ".metadata").write_bytes(f"c{owner}\n{attribute}\n.".encode())
    describe(saved)
    assert name in refused(saved)


def test_a_dotted_name_does_not_lead_out_of_a_class(saved):
    """Protocol 4 can name an attribute of an attribute."""
    words = (b"torch.distributed.checkpoint.metadata", b"Metadata.__init__.__globals__")
    stream = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word for word in words) + b"\x93."
    (saved / ".metadata").write_bytes(stream)
    describe(saved)
    assert "has no place" in refused(saved)


@pytest.mark.parametrize("whole", [True, False], ids=["pickle", "torch.save"])
def test_a_malicious_data_file_is_refused_and_not_executed(whole, saved, tmp_path):
    """torch reads each tensor's bytes with weights_only."""
    witness, index = tmp_path / "witness", FileSystemReader(saved).read_metadata()
    ((_, info),) = index.storage_data.items()
    file = saved / info.relative_path
    if whole:
        file.write_bytes(pickle.dumps(Malice(witness)))
    else:
        torch.save({"weight": Malice(witness)}, file)
    index.storage_data = {key: type(info)(info.relative_path, 0, file.stat().st_size) for key in index.storage_data}
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    describe(saved)
    assert "cannot be read" in refused(saved)
    assert not witness.exists()


def test_a_tensor_that_the_index_calls_bytes_is_refused(saved, tmp_path):
    """torch reads bytes by pickle."""
    witness, index = tmp_path / "witness", FileSystemReader(saved).read_metadata()
    index.state_dict_metadata = {"weight.x": torch.distributed.checkpoint.metadata.BytesStorageMetadata()}
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    ((_, info),) = index.storage_data.items()
    torch.save(Malice(witness), saved / info.relative_path)
    describe(saved)
    assert "of another model" in refused(saved)
    assert not witness.exists()


def test_an_index_names_files_of_its_own_folder_only(saved, tmp_path):
    """Else a checkpoint could read what its sender may not."""
    index = FileSystemReader(saved).read_metadata()
    index.storage_data = {
        key: type(info)(f"../{info.relative_path}", info.offset, info.length)
        for key, info in index.storage_data.items()
    }
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    describe(saved)
    assert "is no file of the checkpoint's" in refused(saved)


BROKEN = {
    "no description": (lambda f: (f / DESCRIPTION).unlink(), "is no checkpoint"),
    "empty description": (lambda f: (f / DESCRIPTION).write_text(""), "cannot be read"),
    "half a description": (lambda f: (f / DESCRIPTION).write_text('{"format": 1,'), "cannot be read"),
    "a list": (lambda f: (f / DESCRIPTION).write_text("[1]"), "cannot be read"),
    "no text": (lambda f: (f / DESCRIPTION).write_bytes(b"\xff\xfe\0"), "cannot be read"),
    "files that are none": (lambda f: changed(f, files=[1]), "cannot be read"),
    "a step that is none": (lambda f: changed(f, step="1"), "step is no int"),
    "a step below 0": (lambda f: changed(f, step=-1), "out of range"),
    "a loss scale that is none": (lambda f: changed(f, loss_scale=0), "out of range"),
    "a model that is none": (lambda f: changed(f, model=None), "model is no dict"),
    "another format": (lambda f: changed(f, format=99), "has format 99"),
    "no index": (lambda f: (f / ".metadata").unlink(), ".metadata is missing"),
    "no index, and described so": (lambda f: [(f / ".metadata").unlink(), describe(f)], "index cannot be read"),
    "no data": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "half the data": (lambda f: os.truncate(f / "__0_0.distcp", 100), "has 100 bytes in place of"),
    "half the index": (lambda f: [os.truncate(f / ".metadata", 100), describe(f)], "index cannot be read"),
    "half the data, and described so": (
        lambda f: [os.truncate(f / "__0_0.distcp", 100), describe(f)],
        "cannot be read",
    ),
    "an index that is another pickle": (
        lambda f: [(f / ".metadata").write_bytes(pickle.dumps([1])), describe(f)],
        "index cannot be read",
    ),
}


def changed(folder, **fields):
    document = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**document, **fields}))


@pytest.mark.parametrize(("harm", "told"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_checkpoint_is_told_in_one_line(harm, told, saved):
    """And named, so that it can be removed."""
    harm(saved)
    assert told in refused(saved)


OTHERS = {
    "another width": ("is of another model: hidden is 32 there and 64 here", ("model.hidden=64",), {}),
    "another batch": ("was trained with global_batch=8, not 4", ("training.global_batch=4",), {}),
    "another length": ("was trained with seq_len=16, not 8", ("training.seq_len=8",), {}),
    "another seed": ("was trained with seed=0, not 1", (), {"seed": 1}),
    "steps that are done": (f"set --steps above {HALF}", (), {"steps": HALF}),
    "other data": ("was trained on other data", (), {"data": True}),
    "a vocabulary too small": ("vocab", ("model.vocab=20",), {}),
}


@pytest.mark.parametrize(("told", "changes", "options"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_another_run_is_refused(told, changes, options, data, halfway, tmp_path):
    """Whatever would change the losses; the folder is left as it was."""
    folder = halfway(small(**TENSOR_PIPELINE))
    before = sorted(path.name for path in folder.rglob("*"))
    options = {"steps": ALL, **options}
    if "data" in options:
        options["data"] = text(tmp_path, "other", 5000)
    with pytest.raises(InputError, match=told):
        run(small(*changes), options.pop("data", data), checkpoint=folder, **options)
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_data_too_short_is_refused_before_a_step(tmp_path):
    """With what it would need."""
    with pytest.raises(InputError, match="token"):
        run(small(), text(tmp_path, length=10), ALL, checkpoint=tmp_path / "checkpoint")
    assert not checkpoints(tmp_path / "checkpoint")


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["data", "description"])
def test_a_full_disk_ends_the_run_with_one_message_and_keeps_the_last_whole(where, data, tmp_path, monkeypatch):
    """Nothing half-written is left, and the run goes on once there is space."""
    run(small(dp=2), data, 2, checkpoint=tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if where == "data":
            patched.setattr(FileSystemWriter, "write_data", full)
        else:
            patched.setattr(module, "_sync", full)
            patched.setattr(module.json, "dumps", full)
        with pytest.raises(RunError, match=r"step-00000004 could not be written: .*No space left on device") as raised:
            run(small(dp=2), data, 8, checkpoint=tmp_path, checkpoint_every=2)
        assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    losses, _ = run(small(dp=2), data, 4, checkpoint=tmp_path)
    assert len(losses) == 2


def test_a_file_in_the_way_of_a_checkpoint_is_told(data, tmp_path):
    """A folder that cannot be made, found out by the rank that makes it."""
    (tmp_path / "file").write_text("")
    with pytest.raises((InputError, RunError), match="file"):
        run(small(), data, 2, checkpoint=tmp_path / "file" / "checkpoint")
