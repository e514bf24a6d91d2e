"""What the trainer reads, and which of it each step trains on."""

import multiprocessing
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.topology.errors import InputError
from exatwin.trainer.corpus import cache_folders, folder_text, standard_library
from exatwin.trainer.data import Batches, Tokens, open_tokens, shuffled


def counted(length: int, vocab: int = 10**9) -> Tokens:
    """Tokens that say where they stand."""
    return Tokens(np.arange(length), "counted", vocab, None, "")


def library(root: Path, **more: bytes) -> Path:
    """A folder like the standard library's; ``__`` in a name stands for a folder."""
    files = {
        "b.py": b"second",
        "a.py": b"first\xff\x00",
        "z__inner.py": b"last",
        "empty.py": b"",
        "a.txt": b"no",
        "test__no.py": b"no",
        "z__tests__no.py": b"no",
        "site-packages__no.py": b"no",
        "dist-packages__no.py": b"no",
        "idlelib__idle_test__yes.py": b"yes",
    }
    for name, content in (files | more).items():
        path = root.joinpath(*name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "__pycache__").mkdir(exist_ok=True)
    (root / "__pycache__" / "no.py").write_bytes(b"no")
    return root


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def refused(path: Path | str | None, vocab: int = 256, cache: Path | None = None) -> str:
    with pytest.raises(InputError) as error:
        open_tokens(None if path is None else str(path), vocab, cache)
    (problem,) = error.value.problems
    assert problem.field == "training.data"
    return problem.message


# --- the corpus ------------------------------------------------------------------------------------------------------


def test_the_library_is_joined_in_the_order_of_its_paths_without_its_tests(tmp_path):
    file = standard_library(tmp_path / "cache", library(tmp_path / "lib"))
    assert file.read_bytes() == b"first\xff\x00\nsecond\nyes\nlast"
    assert names(tmp_path / "cache") == [file.name]


def test_the_corpus_is_written_once_and_anew_for_another_library(tmp_path):
    root = library(tmp_path / "lib")
    first = standard_library(tmp_path, root)
    before = first.stat()
    assert standard_library(tmp_path, root) == first
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (root / "c.py").write_bytes(b"more")
    assert standard_library(tmp_path, root) != first


def test_what_cannot_be_read_of_the_library_is_left_out(tmp_path, monkeypatch):
    root = library(tmp_path / "lib")
    (root / "aa.py").symlink_to(root / "nowhere.py")
    (root / "folder.py").mkdir()
    honest = Path.open

    def spoiled(path, *args, **options):
        if path.name == "b.py":
            raise PermissionError(13, "Permission denied", str(path))
        return honest(path, *args, **options)

    monkeypatch.setattr(Path, "open", spoiled)
    assert standard_library(tmp_path, root).read_bytes() == b"first\xff\x00\nyes\nlast"


def test_processes_that_build_the_corpus_at_once_get_the_same_bytes(tmp_path):
    more = {f"m{number}.py": os.urandom(5000) for number in range(400)}
    root = library(tmp_path / "lib", **more)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(abs, range(8)))  # both are awake
        first, second = pool.map(standard_library, [tmp_path / "cache"] * 2, [root] * 2)
    assert first == second
    assert first.read_bytes() == standard_library(tmp_path / "alone", root).read_bytes()
    assert names(tmp_path / "cache") == [first.name]


@pytest.mark.parametrize("links", [True, False])
def test_a_corpus_that_another_finished_meanwhile_is_not_replaced(tmp_path, monkeypatch, links):
    """Somebody may have mapped it."""
    root, cache = library(tmp_path / "lib"), tmp_path / "cache"
    honest, theirs = Path.hardlink_to, []

    def overtaken(path, target):
        if not theirs:
            theirs.append(None)
            theirs.append(standard_library(cache, root).stat().st_ino)
        if not links and len(theirs) == 2:
            raise PermissionError("no links here")
        honest(path, target)

    monkeypatch.setattr(Path, "hardlink_to", overtaken)
    assert standard_library(cache, root).stat().st_ino == theirs[1]
    assert len(names(cache)) == 1


def test_a_file_system_without_links_and_an_empty_file_of_a_crash_are_no_hindrance(tmp_path, monkeypatch):
    root = library(tmp_path / "lib")
    file = standard_library(tmp_path / "one", root)
    whole = file.read_bytes()
    file.write_bytes(b"")
    assert standard_library(tmp_path / "one", root).read_bytes() == whole

    def fails(path, target):
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", fails)
    assert standard_library(tmp_path / "two", root).read_bytes() == whole
    assert len(names(tmp_path / "two")) == 1


def test_the_cache_is_the_users_or_else_temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    root = library(tmp_path / "lib")
    assert standard_library(None, root).parent == tmp_path / "xdg" / "exatwin" == cache_folders()[0]
    (tmp_path / "no folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    assert standard_library(None, root).parent.parent == tmp_path / "temporary"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folders()[0] == tmp_path / "home" / ".cache" / "exatwin"


def test_a_cache_that_cannot_be_written_and_a_library_without_source_are_said(tmp_path):
    (tmp_path / "no folder").write_text("")
    with pytest.raises(InputError, match=r"no cache folder can be written into.*no folder"):
        standard_library(tmp_path / "no folder", library(tmp_path / "lib"))
    with pytest.raises(InputError, match="has no file that can be read; name a text or token file"):
        standard_library(tmp_path, tmp_path / "nothing here")


def test_the_real_library_is_megabytes_of_text_and_quickly_there(tmp_path):
    began = time.perf_counter()
    tokens = open_tokens(None, 50_257, tmp_path)
    again = open_tokens(None, 50_257, tmp_path)
    assert time.perf_counter() - began < 2.0
    assert len(tokens) > 5e6
    assert tokens.vocab_used == 256
    assert tokens.digest == again.digest
    assert "standard library" in tokens.source
    assert isinstance(tokens.ids, np.memmap)


# --- a user's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "vocab_used"),
    [
        ("t.bin", "<u2", None),
        ("t.u32.bin", "<u4", None),
        ("t.txt", "u1", 256),
        ("t", "u1", 256),
        ("T.BIN", "<u2", None),
    ],
)
def test_a_file_is_read_as_its_name_says(tmp_path, name, dtype, vocab_used):
    written = np.arange(1, 201).astype(dtype)
    written.tofile(tmp_path / name)
    tokens = open_tokens(str(tmp_path / name), 256)
    assert tokens.ids.tolist() == written.tolist()
    assert isinstance(tokens.ids, np.memmap)
    assert (tokens.source, tokens.vocab_used) == (str(tmp_path / name), vocab_used)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "<i8", "<u8"])
def test_an_array_of_any_integers_is_mapped(tmp_path, dtype):
    np.save(tmp_path / "t.npy", np.arange(100, dtype=dtype))
    tokens = open_tokens(str(tmp_path / "t.npy"), 100)
    assert isinstance(tokens.ids, np.memmap)
    assert Batches(tokens, 99, 1, 0).rows(0, 0, 1).tolist() == [list(range(100))]


def test_a_folder_is_joined_again_when_a_file_of_it_changes(tmp_path):
    root, cache = tmp_path / "mine", tmp_path / "mine" / "cache"
    (root / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.MD", "deep/c.jsonl", "no.bin", "no.npy"):
        (root / name).write_text(name)
    tokens = open_tokens(str(root), 256, cache)
    assert bytes(tokens.ids) == b"a.MD\nb.txt\ndeep/c.jsonl"
    assert tokens.source == str(root)
    before = folder_text(root, cache)
    assert folder_text(root, cache) == before
    os.utime(root / "b.txt", ns=(1, 1))
    assert folder_text(root, cache) != before


def test_a_folder_is_not_joined_without_a_file_that_cannot_be_read(tmp_path):
    """What a user gave is meant whole; a library's file more or less is not."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    assert re.search(r"b\.txt: cannot be read: No such file", refused(tmp_path, cache=tmp_path / "cache"))


def test_the_digest_notices_other_data(tmp_path):
    size = 3 * 2**20
    written = np.zeros(size, np.uint8)
    digests = set()
    for place in (None, 0, size - 1):
        if place is not None:
            written[place] += 1
        written.tofile(tmp_path / "t.txt")
        digests.add(open_tokens(str(tmp_path / "t.txt"), 256).digest)
    np.append(written, written[-1:]).tofile(tmp_path / "t.txt")
    digests.add(open_tokens(str(tmp_path / "t.txt"), 256).digest)
    assert len(digests) == 4
    written.tofile(tmp_path / "other name")
    assert open_tokens(str(tmp_path / "other name"), 256).digest in digests


BAD_FILES = [
    ("e.txt", b"", "is empty"),
    ("e.npy", b"", "is empty"),
    ("e.bin", b"", "is empty"),
    ("odd.bin", b"abc", r"3 bytes .* 2-byte tokens.*\.u32\.bin .*uint32.*uint16"),
    ("odd.u32.bin", b"abcdef", r"6 bytes .* 4-byte tokens.*\.u32\.bin"),
    ("text.npy", b"no array", "is no array that can be mapped.*one dimension of integers"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_a_file_that_holds_no_tokens_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name)
    assert message.startswith(str(tmp_path / name))
    assert re.search(said, message)


BAD_ARRAYS = {
    "floats": (np.zeros(9), "holds float64 in 1 dimensions; .* one dimension of integers"),
    "flags": (np.zeros(9, bool), "holds bool"),
    "a table": (np.zeros((3, 3), int), "holds int64 in 2 dimensions"),
    "a number": (np.array(3), "in 0 dimensions"),
    "objects": (np.array([{}], object), "is no array that can be mapped"),
    "nothing": (np.zeros(0, int), "holds no token|is no array"),
}


@pytest.mark.parametrize(("array", "said"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_an_array_that_is_no_row_of_integers_is_refused(tmp_path, array, said):
    np.save(tmp_path / "t.npy", array)
    assert re.search(said, refused(tmp_path / "t.npy"))


def test_an_array_cut_short_and_an_archive_are_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(100))
    whole = (tmp_path / "t.npy").read_bytes()
    (tmp_path / "t.npy").write_bytes(whole[:-8])
    assert "is no array that can be mapped" in refused(tmp_path / "t.npy")
    with (tmp_path / "t.npy").open("wb") as file:
        np.savez(file, a=np.arange(3))
    assert "is an archive of arrays" in refused(tmp_path / "t.npy")


@pytest.mark.parametrize(
    "name", ["missing.txt", "missing.npy", "missing/", "a\0b", "~nobody-of-that-name/x", "x" * 300]
)
def test_a_name_of_no_file_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert re.search("no such file|cannot be read", refused(name))


@pytest.mark.parametrize("name", ["t.txt", "t.npy", "t.bin"])
def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"abcd")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(np, "memmap", denied)
    monkeypatch.setattr(np, "load", denied)
    assert "cannot be read: Permission denied" in refused(tmp_path / name)


def test_a_pipe_and_a_folder_without_text_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "t.bin").write_bytes(b"ab")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe")
    assert re.search(r"holds no text in files that end in .*\.jsonl", refused(tmp_path, cache=tmp_path / "cache"))


@pytest.mark.parametrize("name", [None, "t.txt", "."])
def test_bytes_take_a_vocabulary_of_256(tmp_path, monkeypatch, name):
    (tmp_path / "t.txt").write_bytes(b"text")
    monkeypatch.chdir(tmp_path)
    assert re.search("model.vocab of 256 or more, but it is 255", refused(name, vocab=255, cache=tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()
    (tmp_path / "t.bin").write_bytes(b"\1\0")
    assert open_tokens("t.bin", 2).ids.tolist() == [1]


@pytest.mark.parametrize(
    ("dtype", "wrong"), [("<u2", 100), ("<i4", -1), ("<i8", 2**40), ("<u8", 2**64 - 1)], ids=["u2", "i4", "i8", "u8"]
)
def test_a_token_outside_the_vocabulary_is_named_by_the_batch_that_meets_it(tmp_path, dtype, wrong):
    written = (np.arange(41) % 100).astype(dtype)
    written[23] = wrong
    np.save(tmp_path / "t.npy", written)
    batches = Batches(open_tokens(str(tmp_path / "t.npy"), 100), 10, 4, 0)
    place = batches.window_numbers(0, 4).tolist().index(2)
    with pytest.raises(InputError) as error:
        batches.rows(0, place, 1)
    (problem,) = error.value.problems
    assert problem.field == "training.data"
    assert f"{tmp_path / 't.npy'}: token {wrong} at position 23" in problem.message
    assert "model.vocab=100" in problem.message
    assert len(batches.rows(0, (place + 1) % 4, 1)) == 1


# --- batches ---------------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 300)


@given(size=SIZES, seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
def test_an_order_holds_every_window_once(size, seed, epoch):
    assert sorted(shuffled(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


def test_every_window_comes_first_as_often_as_any():
    """In 2,000 epochs each of 10 windows is expected first 200 times; 5 standard deviations are 67."""
    first = [int(shuffled(np.arange(1), 10, 3, epoch)[0]) for epoch in range(2000)]
    assert np.bincount(first, minlength=10) == pytest.approx(np.full(10, 200), abs=67)


def test_neighbours_do_not_stay_neighbours():
    order = shuffled(np.arange(10_000), 10_000, 1, 0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert np.count_nonzero(np.diff(order) == 1) < 10


def test_one_window_of_more_than_memory_holds_is_found_at_once():
    size = 2**45 + 7
    found = shuffled(np.array([0, 1, size - 1]), size, 1, 0)
    assert len(set(found.tolist())) == 3
    assert found.min() >= 0
    assert found.max() < size


@given(
    windows=SIZES,
    seq_len=st.integers(1, 7),
    rest=st.integers(0, 6),
    batch=st.integers(1, 300),
    seed=st.integers(0, 2**40),
)
def test_an_epoch_visits_every_window_once_and_targets_are_shifted_by_one(windows, seq_len, rest, batch, seed):
    batch = min(batch, windows)
    batches = Batches(counted(windows * seq_len + 1 + rest % seq_len), seq_len, batch, seed)
    assert batches.windows == windows
    steps = -(-2 * windows // batch)
    rows = np.concatenate([batches.rows(step, 0, batch) for step in range(steps)])
    assert rows.dtype == np.int64
    assert (np.diff(rows) == 1).all()
    for epoch in range(2):
        starts = rows[epoch * windows : (epoch + 1) * windows, 0]
        assert sorted(starts.tolist()) == list(range(0, windows * seq_len, seq_len))


@given(batch=st.integers(1, 24), data=st.data())
def test_any_slice_of_any_step_is_what_reading_from_the_start_gives(batch, data):
    """So the batch is the same in every layout, and the number of the step is all that a restart needs."""
    tokens = counted(24 * 3 + 1)
    inorder = Batches(tokens, 3, batch, 5)
    wholes = [inorder.rows(step, 0, batch) for step in range(6)]
    step = data.draw(st.integers(0, 5))
    first = data.draw(st.integers(0, batch))
    count = data.draw(st.integers(0, batch - first))
    part = Batches(tokens, 3, batch, 5).rows(step, first, count)
    assert part.shape == (count, 4)
    assert part.tolist() == wholes[step][first : first + count].tolist()


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(Batches(counted(101), 1, 50, seed).window_numbers(epoch * 100, 100).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    """Else a run that goes on elsewhere would read some text twice; these numbers never change."""
    order = [6, 1, 0, 2, 5, 4, 3, 7, 0, 4, 1, 3, 2, 5, 6, 7]
    assert Batches(counted(17), 2, 4, 1).window_numbers(0, 16).tolist() == order


@pytest.mark.parametrize(
    ("length", "seq_len", "batch", "said"),
    [
        (1, 1, 1, "has 1 tokens, .* needs 2; neither .* fits; give more text"),
        (10, 10, 1, "has 10 tokens, .* needs 11; training.seq_len of at most 9 fits"),
        (31, 10, 4, "needs 41; training.seq_len of at most 7 or training.global_batch of at most 3 fits"),
        (3, 1, 5, "needs 6; training.global_batch of at most 2 fits"),
    ],
)
def test_data_too_short_for_a_step_are_refused_with_what_fits(length, seq_len, batch, said):
    with pytest.raises(InputError, match=f"training.data: counted: data too short: .*{said}"):
        Batches(counted(length), seq_len, batch, 0)
    for longest in re.findall(r"seq_len of at most (\d+)", said):
        assert Batches(counted(length), int(longest), batch, 0).windows >= batch
    for most in re.findall(r"global_batch of at most (\d+)", said):
        assert Batches(counted(length), seq_len, int(most), 0).windows >= int(most)


@pytest.mark.parametrize(("step", "first", "count"), [(-1, 0, 1), (0, -1, 1), (0, 0, 5), (0, 4, 1), (0, 0, -1)])
def test_sequences_outside_the_batch_are_an_error_of_the_caller(step, first, count):
    with pytest.raises(ValueError, match="has no sequences"):
        Batches(counted(100), 1, 4, 0).rows(step, first, count)


@pytest.mark.parametrize(("seq_len", "batch", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_sizes_of_no_meaning_are_an_error_of_the_caller(seq_len, batch, seed):
    with pytest.raises(ValueError, match=f"seed={seed}"):
        Batches(counted(100), seq_len, batch, seed)
