"""Starting the ranks of a run on this host, or joining those that torchrun or srun has started.

Ranks of this host are forked, so that torch is imported once, and watched: when one dies the others are stopped within
seconds and one message names it. They find each other through a file of their own attempt, so no port can be taken; a
rank whose parent dies is killed by the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..scenarios.scenario import Scenario
from ..topology.errors import InputError, RunError, input_error
from .checkpoint import clear_partial
from .grid import place_of
from .measure import RankReport
from .options import TrainOptions
from .worker import Seat, StepNews, TrainingError, run_rank

PATIENCE_S = 3.0  # for what other ranks say once one has failed, and for their end once all is done
SAME_S = 0.5  # timeout and srun send a signal to a process and to its group: two within this are one
_LOOK_S = 0.2  # between looks at whether somebody asked to stop
_ASKS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SHAKEN = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe", "timed out")


class RankDiedError(RunError):
    """A run ended because one of its ranks did; the message names it."""


class RunEndedError(RankDiedError):
    """One that would end so again, such as for a loss that is no number."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        reports: Of all ranks; None on a rank of a joined run that is not the first.
        stopped: Whether it was asked to stop before its last step.
        restarts: Times that it began again.
    """

    reports: list[RankReport] | None
    stopped: bool
    restarts: int


@dataclass(frozen=True)
class Joined:
    """A rank that something else has started: torchrun, or srun."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    attempt: str
    serves: bool


def joined(environment: Mapping[str, str]) -> Joined | None:
    """This process's rank, where torchrun or srun has started it; None where it stands alone.

    Raises:
        InputError: If what they left in the environment is incomplete.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        found = {
            name: environment.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        missing = [name for name, value in found.items() if value is None and name != "LOCAL_RANK"]
        if missing:
            raise input_error(f"{', '.join(missing)} is missing beside RANK and WORLD_SIZE", where="environment")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        return _checked(
            _number(found, "RANK"),
            _number(found, "WORLD_SIZE"),
            _number({**found, "LOCAL_RANK": found["LOCAL_RANK"] or found["RANK"]}, "LOCAL_RANK"),
            str(found["MASTER_ADDR"]),
            _number(found, "MASTER_PORT"),
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            serves=not agent and found["RANK"] == "0",
        )
    if "SLURM_PROCID" in environment and _number({"SLURM_NTASKS": "1", **environment}, "SLURM_NTASKS") > 1:
        port = 20000 + _number({"SLURM_JOB_ID": "0", **environment}, "SLURM_JOB_ID") % 20000
        return _checked(
            _number(environment, "SLURM_PROCID"),
            _number(environment, "SLURM_NTASKS"),
            _number(environment, "SLURM_LOCALID"),
            environment.get("MASTER_ADDR") or _first_host(environment),
            _number(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else port,
            environment.get("SLURM_RESTART_COUNT", "0"),
            serves=environment["SLURM_PROCID"] == "0",
        )
    return None


def _checked(rank: int, world: int, local_rank: int, address: str, port: int, attempt: str, *, serves: bool) -> Joined:
    if rank >= world:
        raise input_error(f"rank {rank} is none of {world}, which count from 0", where="environment")
    if not 0 < port < 65536:
        raise input_error(f"MASTER_PORT={port} is no port; they are 1 to 65535", where="environment")
    return Joined(rank, world, local_rank, address, port, attempt, serves)


def _number(environment: Mapping[str, str | None], name: str) -> int:
    text = environment.get(name) or ""
    if not text.isdecimal():
        raise input_error(f"{name}={text!r} is no whole number", where="environment")
    return int(text)


def _first_host(environment: Mapping[str, str]) -> str:
    """The first node of a Slurm job."""
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST") or ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
        return listed.stdout.split()[0]
    if nodes and "[" not in nodes:
        return nodes.split(",")[0]
    raise input_error("the first node of the job is not known; set MASTER_ADDR", where="environment")


def join(scenario: Scenario, options: TrainOptions, seat: Joined, tell: Callable[[StepNews], None]) -> Outcome:
    """Train as one rank of a job that torchrun or srun has started.

    Raises:
        InputError: If the job has other ranks than the scenario, or the port is taken.
    """
    if seat.world != scenario.devices:
        raise input_error(
            f"{seat.world} ranks were started, but the scenario has devices={scenario.devices}", field="devices"
        )
    with _heard_in_collectives() as asked:
        try:
            patience = datetime.timedelta(seconds=min(options.timeout_s, 300.0))
            store = dist.TCPStore(seat.address, seat.port, seat.world, is_master=seat.serves, timeout=patience)
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise input_error(
                f"{seat.address}:{seat.port} cannot be used to meet: {reason}; set MASTER_PORT to a free port",
                where="environment",
            ) from None
        here = Seat(seat.rank, seat.world, seat.local_rank, dist.PrefixStore(f"exatwin/{seat.attempt}", store))
        try:
            reports = run_rank(scenario, options, here, tell, asked.is_set)
        except (RuntimeError, OSError) as error:
            raise RankDiedError(_named(scenario, seat.rank, _reason(error))) from error
    stopped = _cut_short(reports, options) if reports is not None else asked.is_set()
    return Outcome(reports, stopped, int(seat.attempt) if seat.attempt.isdecimal() else 0)


def _cut_short(reports: list[RankReport], options: TrainOptions) -> bool:
    return reports[0].steps[-1].step + 1 < options.steps


@contextlib.contextmanager
def _heard_in_collectives() -> Iterator[threading.Event]:
    """An event that is set by Ctrl-C or a batch system's warning; a second one ends the process.

    Python's own handlers wait until torch gives the main thread back, which a rank whose peers hang never does. So
    the signals' numbers go through a pipe to a thread.
    """
    asked, (there, here) = threading.Event(), os.pipe()
    os.set_blocking(here, False)

    def listen() -> None:
        first = None
        while numbers := os.read(there, 16):
            if not {signal.SIGINT, signal.SIGTERM} & set(numbers):
                continue
            if first is not None and time.monotonic() - first > SAME_S:
                os._exit(128 + signal.SIGINT)
            first = first or time.monotonic()
            asked.set()
        os.close(there)

    listener = threading.Thread(target=listen, name="exatwin signals", daemon=True)
    try:
        before = signal.set_wakeup_fd(here, warn_on_full_buffer=False)
    except ValueError:  # not the main thread, which alone hears signals
        os.close(here)
        os.close(there)
        yield asked
        return
    listener.start()
    try:
        with _on_signals(lambda *_: None):
            yield asked
    finally:
        signal.set_wakeup_fd(before)
        os.close(here)
        listener.join()


# --- ranks of this host -----------------------------------------------------------------------------------------------


def launch(
    scenario: Scenario,
    options: TrainOptions,
    tell: Callable[[StepNews], None],
    note: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train on this host, one process a rank.

    Args:
        scenario: What is trained, found to be what the trainer runs.
        options: How.
        tell: Told of each step.
        note: Told of restarts and of a request to stop.

    Raises:
        InputError: If data, checkpoint or devices cannot be used.
        RankDiedError: If a rank died, and no restart is left.
        KeyboardInterrupt: If it is asked to stop a second time.
    """
    for attempt in range(options.max_restarts + 1):
        try:
            return _Attempt(scenario, options, attempt).run(tell, note)
        except RankDiedError as error:
            if attempt == options.max_restarts or isinstance(error, RunEndedError):
                raise
            note(f"{error}; beginning again from the last checkpoint ({attempt + 1} of {options.max_restarts})")
    raise AssertionError("the last attempt returns or raises")


class _Attempt:
    """The processes of one attempt."""

    def __init__(self, scenario: Scenario, options: TrainOptions, number: int) -> None:
        self._scenario, self._options, self._number = scenario, options, number
        # Forked, ranks need not import torch again; but CUDA cannot be used in a fork of what has looked for GPUs.
        self._context: Any = multiprocessing.get_context("fork" if local_devices(options) is None else "spawn")
        self._stop = self._context.RawValue("b", 0)  # with no lock, which a rank that is killed could keep
        self._processes: list[Any] = []
        self._lines: dict[Connection, int] = {}
        self._told = False

    def run(self, tell: Callable[[StepNews], None], note: Callable[[str], None]) -> Outcome:
        asked_s: float | None = None
        ending = False

        def ask(*_: Any) -> None:
            nonlocal asked_s
            if asked_s is None:
                asked_s = time.monotonic()
                self._stop.value = 1
            elif not ending and time.monotonic() - asked_s > SAME_S:
                raise KeyboardInterrupt

        def say() -> None:  # by the loop: a handler must not print into the middle of what it interrupts
            if asked_s is not None and not self._told:
                self._told = True
                note("stopping after this step; once more ends it at once")

        with tempfile.TemporaryDirectory(prefix="exatwin-") as folder, _on_signals(ask):
            try:
                self._start(str(Path(folder) / "meeting"))
                reports = self._watch(tell, say)
                self._wait()
            finally:
                ending = True
                self._end()
        return Outcome(reports, _cut_short(reports, self._options), self._number)

    def _start(self, meeting: str) -> None:
        for rank in range(self._scenario.devices):
            here, there = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=_rank_process,
                args=(self._scenario, self._options, rank, meeting, there, self._stop, os.getpid()),
                name=f"exatwin rank {rank}",
                daemon=True,
            )
            # A signal is for the parent; a rank hears none before it has said so.
            masked = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            there.close()
            self._processes.append(process)
            self._lines[here] = rank

    def _watch(self, tell: Callable[[StepNews], None], say: Callable[[], None]) -> list[RankReport]:
        """Hear the ranks until all are done, or one is dead."""
        reports: list[RankReport] | None = None
        failures: dict[int, tuple[float, Any]] = {}
        done: set[int] = set()
        first_failure = None
        while len(done) < len(self._processes):
            left = None if first_failure is None else first_failure + PATIENCE_S - time.monotonic()
            ready = wait(list(self._lines), _LOOK_S if left is None else min(max(left, 0.0), _LOOK_S))
            say()
            for line in ready:
                assert isinstance(line, Connection)
                rank = self._lines[line]
                try:
                    kind, body = line.recv()
                except (EOFError, OSError):
                    del self._lines[line]
                    if rank not in done and rank not in failures:
                        failures[rank] = (time.monotonic(), self._ended(rank))
                    continue
                if kind == "step":
                    tell(body)
                elif kind == "done":
                    done.add(rank)
                    reports = body if body is not None else reports
                else:
                    failures[rank] = (time.monotonic(), body)
            if failures:
                first_failure = first_failure or time.monotonic()
                if (
                    not self._lines
                    or time.monotonic() - first_failure >= PATIENCE_S
                    or len(failures) + len(done) == len(self._processes)
                ):
                    self._raise(failures)
        assert reports is not None
        return reports

    def _ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(PATIENCE_S)
        code = process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def _raise(self, failures: Mapping[int, tuple[float, Any]]) -> None:
        """The failure that the others followed from: what a user wrote, else the first that is no lost connection."""
        for _, body in failures.values():
            if isinstance(body, InputError):
                raise body
        told = [(at, rank, str(body)) for rank, (at, body) in failures.items()]
        own = [entry for entry in told if not any(word in entry[2] for word in _SHAKEN)]
        _, rank, reason = min(own or told)
        again = not isinstance(failures[rank][1], TrainingError)
        raise (RankDiedError if again else RunEndedError)(_named(self._scenario, rank, reason))

    def _wait(self) -> None:
        """Let ranks that are done end by themselves."""
        until = time.monotonic() + PATIENCE_S
        for process in self._processes:
            process.join(max(until - time.monotonic(), 0.0))

    def _end(self) -> None:
        """Leave no process behind, and nothing half-written."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for line in self._lines:
            line.close()
        if self._options.checkpoint is not None:
            clear_partial(self._options.checkpoint)


def _rank_process(
    scenario: Scenario, options: TrainOptions, rank: int, meeting: str, line: Connection, stop: Any, parent: int
) -> None:
    """What a forked rank does; it tells its parent of its steps and its end."""
    for name in _ASKS:
        signal.signal(name, signal.SIG_IGN)  # the parent hears it, and asks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKS)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; a host's name need not lead anywhere
    try:
        store = dist.FileStore(meeting, scenario.devices)
        seat = Seat(rank, scenario.devices, rank, store)
        reports = run_rank(scenario, options, seat, lambda news: line.send(("step", news)), lambda: bool(stop.value))
        line.send(("done", reports))
    except (InputError, TrainingError) as error:
        line.send(("failed", error))
    except BaseException as error:
        if os.environ.get("EXATWIN_TRACEBACK"):
            traceback.print_exc()
        with contextlib.suppress(OSError):
            line.send(("failed", _reason(error)))
    finally:
        line.close()
        os._exit(0)  # nothing of the parent's is to be torn down here


def _reason(error: BaseException) -> str:
    """One line for people."""
    if isinstance(error, (TrainingError, OSError)) and str(error):
        return str(error)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [text.strip() for text in str(cause).splitlines() if text.strip()]
    return f"{type(cause).__name__}: {lines[0][:300]}" if lines else type(cause).__name__


def _named(scenario: Scenario, rank: int, reason: str) -> str:
    place = place_of(scenario, rank)
    return f"rank {rank} (pp {place.pp}, dp {place.dp}, cp {place.cp}, tp {place.tp}) {_told(reason)}"


def _told(reason: str) -> str:
    return reason if reason.startswith(("killed", "ended")) else f"failed: {reason}"


@contextlib.contextmanager
def _on_signals(handler: Callable[..., None]) -> Iterator[None]:
    """Send Ctrl-C and a batch system's warning to a handler; nothing is changed off the main thread."""
    try:
        before = {name: signal.signal(name, handler) for name in _ASKS}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for name, old in before.items():
            signal.signal(name, old)


def local_devices(options: TrainOptions) -> int | None:
    """GPUs of this host, where ranks run on GPUs; None where they run on its cores."""
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        return None
    return torch.cuda.device_count()
