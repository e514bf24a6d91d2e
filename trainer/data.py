"""The tokens that the trainer reads, and which of them make up the batch of a step.

What ``training.data`` may name:

| it is | read as |
|---|---|
| left out | the source of Python's standard library, byte by byte |
| a folder | its ``.txt .md .py .rst .json .jsonl`` files in the order of their paths, byte by byte |
| ``NAME.npy`` | one dimension of integers, each a token |
| ``NAME.u32.bin`` | raw little-endian uint32, each a token |
| any other ``NAME.bin`` | raw little-endian uint16, each a token |
| any other file | byte by byte |

A byte is a token of a vocabulary of 256. All are mapped, never read whole, so a file may be larger than memory.

The batch of a step depends on the tokens, ``seq_len``, ``global_batch`` and the seed alone, whatever the
layout is; so the number of the step is all that a restart needs to know to go on with the next sequence.
"""

from __future__ import annotations

import hashlib
import platform
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..topology.errors import InputError, input_error
from .corpus import FIELD, folder_text, standard_library

BYTE_VOCAB = 256
_SAMPLE_BYTES = 2**20
_ROUNDS = 6  # of the Feistel network: four look random where its halves are wide, and small ones take more


@dataclass(frozen=True, eq=False)
class Tokens:
    """A text as numbers, mapped from its file.

    Attributes:
        ids: One dimension of integers.
        source: What was read, for people.
        vocab: Of the model; a token outside it is an error of the batch that meets it.
        vocab_used: 256 where a token is a byte; None where the file alone knows.
        digest: A short fingerprint of the length and of the first and last MiB, by which a checkpoint
            notices other data.
    """

    ids: np.ndarray
    source: str
    vocab: int
    vocab_used: int | None
    digest: str

    def __len__(self) -> int:
        return len(self.ids)


def open_tokens(path: str | None, vocab: int, cache: Path | None = None) -> Tokens:
    """The tokens of a file, of a folder, or of the corpus that every machine has.

    Args:
        path: As the table above says; None for the source of Python's standard library.
        vocab: Tokens that the model knows.
        cache: The folder in which the files of a folder are joined; left out: the user's.

    Raises:
        InputError: If it is missing, empty, unreadable or of another kind, or ``vocab`` is less than bytes need.
    """
    if path is None:
        _check_byte_vocab(vocab, "the source of Python's standard library")
        file = standard_library(cache)
        return _byte_tokens(file, f"the source of Python {platform.python_version()}'s standard library", vocab)
    try:
        return _open(Path(path).expanduser(), vocab, cache)
    except InputError:
        raise
    except FileNotFoundError:
        raise _wrong(path, "no such file") from None
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RuntimeError) as error:  # a name no file system takes: a NUL, ~nobody
        raise _wrong(path, f"cannot be read: {error}") from None


class Batches:
    """Which tokens each step trains on; any step can be asked for, in any order.

    The tokens are cut into windows of ``seq_len + 1`` at a stride of ``seq_len``: the last token of a window,
    which is only predicted, is the first of the next. What is left after the last window is not used. An epoch
    visits every window once, in an order of its own, which is computed and not stored; the next epoch
    starts where it ends, within a batch too. Nothing is remembered: the step says it all.

    Args:
        tokens: What to read.
        seq_len: Tokens in a sequence.
        global_batch: Sequences in a step, over all replicas.
        seed: Of the order, at least 0.

    Raises:
        InputError: If there are fewer windows than sequences in a step.
    """

    def __init__(self, tokens: Tokens, seq_len: int, global_batch: int, seed: int) -> None:
        if min(seq_len, global_batch) < 1 or seed < 0:
            raise ValueError(f"seq_len={seq_len}, global_batch={global_batch}, seed={seed}")
        self.tokens, self.seq_len, self.global_batch, self.seed = tokens, seq_len, global_batch, seed
        self.windows = max(len(tokens) - 1, 0) // seq_len
        if self.windows < global_batch:
            raise _too_short(tokens, seq_len, global_batch)

    def rows(self, step: int, first: int, count: int) -> np.ndarray:
        """Sequences ``first`` to ``first + count - 1`` of the batch of a step, each with the token after its last.

        Returns:
            int64 of shape ``(count, seq_len + 1)``: ``[:, :-1]`` goes in and ``[:, 1:]`` is to be predicted.

        Raises:
            InputError: If a token is none of the vocabulary.
            ValueError: If the batch has no such sequences.
        """
        if step < 0 or first < 0 or count < 0 or first + count > self.global_batch:
            raise ValueError(f"step {step} has no sequences {first} to {first + count - 1}, of {self.global_batch}")
        length = self.seq_len + 1
        rows = np.empty((count, length), dtype=np.int64)
        starts = self.window_numbers(step * self.global_batch + first, count) * self.seq_len
        for row, start in zip(rows, starts.tolist(), strict=True):
            row[:] = self.tokens.ids[start : start + length]
        if self.tokens.vocab_used is None:  # bytes were compared with the vocabulary when they were opened
            self._check(rows, starts)
        return rows

    def window_numbers(self, first: int, count: int) -> np.ndarray:
        """The windows of ``count`` samples from number ``first`` on, counted over all steps."""
        numbers = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, place = divmod(first + done, self.windows)
            part = min(count - done, self.windows - place)
            places = np.arange(place, place + part, dtype=np.uint64)
            numbers[done : done + part] = shuffled(places, self.windows, self.seed, epoch)
            done += part
        return numbers

    def _check(self, rows: np.ndarray, starts: np.ndarray) -> None:
        wrong = (rows < 0) | (rows >= self.tokens.vocab)
        if not wrong.any():
            return
        row, column = np.argwhere(wrong)[0].tolist()
        position = int(starts[row]) + column
        raise _wrong(
            self.tokens.source,
            f"token {int(self.tokens.ids[position])} at position {position} is outside the vocabulary; "
            f"with model.vocab={self.tokens.vocab} it can be 0 to {self.tokens.vocab - 1}",
        )


def shuffled(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where each of some places out of ``0 .. size - 1`` goes in the order of an epoch; no two go to the same.

    A Feistel network permutes the numbers of an even count of bits, the fewest that hold ``size``. A number
    that lands outside goes through it again until it lands inside, less than four passes on average; so
    the numbers inside are permuted among themselves, and no table of them is needed.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, for the cycle walking.

    >>> shuffled(np.arange(8), 8, seed=1, epoch=0).tolist()
    [6, 1, 0, 2, 5, 4, 3, 7]
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(_ROUNDS, np.uint64)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        values[outside] = (left << half) | right
        outside = values >= size
    return values.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Each number made into one that looks like no relative of it: the finalizer of SplitMix64.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; the
    constants are Stafford's Mix13.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _open(path: Path, vocab: int, cache: Path | None) -> Tokens:
    facts = path.stat()
    if stat.S_ISDIR(facts.st_mode):
        _check_byte_vocab(vocab, str(path))
        return _byte_tokens(folder_text(path, cache), str(path), vocab)
    if not stat.S_ISREG(facts.st_mode):
        raise _wrong(str(path), "is neither a file nor a folder")
    if not facts.st_size:
        raise _wrong(str(path), "is empty")
    name = path.name.lower()
    if name.endswith(".npy"):
        return _tokens(_npy(path), str(path), vocab)
    if name.endswith(".bin"):
        return _tokens(_raw(path, facts.st_size), str(path), vocab)
    _check_byte_vocab(vocab, str(path))
    return _byte_tokens(path, str(path), vocab)


def _npy(path: Path) -> np.ndarray:
    """The array of a ``.npy`` file, mapped."""
    asked = "a .npy file of tokens holds one dimension of integers"
    try:
        ids: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a broken header raises whatever Python's own parser does
        reason = " ".join(str(error).split())[:120]
        raise _wrong(str(path), f"is no array that can be mapped ({reason}); {asked}") from None
    if not isinstance(ids, np.ndarray):  # several arrays, under this name
        raise _wrong(str(path), f"is an archive of arrays; {asked}")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _wrong(str(path), f"holds {ids.dtype} in {ids.ndim} dimensions; {asked}")
    if not len(ids):
        raise _wrong(str(path), "holds no token")
    return ids


def _raw(path: Path, size_bytes: int) -> np.ndarray:
    """The tokens of a ``.bin`` file, mapped."""
    dtype = np.dtype("<u4") if path.name.lower().endswith(".u32.bin") else np.dtype("<u2")
    if size_bytes % dtype.itemsize:
        raise _wrong(
            str(path),
            f"its {size_bytes} bytes are no whole number of {dtype.itemsize}-byte tokens; a file that ends in .u32.bin "
            "is read as little-endian uint32, any other .bin as little-endian uint16",
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _byte_tokens(file: Path, source: str, vocab: int) -> Tokens:
    ids = np.memmap(file, dtype=np.uint8, mode="r")
    return Tokens(ids, source, vocab, BYTE_VOCAB, _fingerprint(ids))


def _tokens(ids: np.ndarray, source: str, vocab: int) -> Tokens:
    return Tokens(ids, source, vocab, None, _fingerprint(ids))


def _fingerprint(ids: np.ndarray) -> str:
    """Of the length, the type and two samples: a text of terabytes is not read through."""
    most = _SAMPLE_BYTES // ids.dtype.itemsize
    text = hashlib.sha256(f"{len(ids)} {ids.dtype.str} ".encode())
    text.update(ids[:most].tobytes())
    text.update(ids[-most:].tobytes())
    return text.hexdigest()[:16]


def _check_byte_vocab(vocab: int, source: str) -> None:
    if vocab < BYTE_VOCAB:
        raise _wrong(
            source,
            f"is read byte by byte, which takes model.vocab of {BYTE_VOCAB} or more, but it is {vocab}; "
            "name a .npy or .bin file of tokens, or enlarge the vocabulary",
        )


def _too_short(tokens: Tokens, seq_len: int, global_batch: int) -> InputError:
    windows = max(len(tokens) - 1, 0) // seq_len
    ways = []
    if longest := (len(tokens) - 1) // global_batch:
        ways.append(f"training.seq_len of at most {longest}")
    if windows:
        ways.append(f"training.global_batch of at most {windows}")
    none = "neither a shorter sequence nor a smaller batch alone fits; give more text"
    fits = f"{' or '.join(ways)} fits" if ways else none
    return _wrong(
        tokens.source,
        f"data too short: it has {len(tokens)} tokens, and a step of {global_batch} sequences of {seq_len} needs "
        f"{seq_len * global_batch + 1}; {fits}",
    )


def _wrong(source: str, message: str) -> InputError:
    return input_error(f"{source}: {message}", field=FIELD)
