"""Starting ranks, and what happens when they die, are asked to stop, or are given what cannot be used."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from exatwin.cli import run as command
from exatwin.topology.errors import InputError, RunError
from exatwin.trainer import launch as module
from exatwin.trainer import memory
from exatwin.trainer.checkpoint import checkpoints
from exatwin.trainer.launch import RankDiedError, RunEndedError, joined, launch
from exatwin.trainer.measure import measurement
from exatwin.trainer.options import TrainOptions

from .small_runs import arguments, marked, run, small, text

MARK = "EXATWIN_TEST_MARK"
LONG = 10_000  # steps that no test waits for


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """What all runs here read."""
    return text(tmp_path_factory.mktemp("data"), length=8000)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No test is itself a rank of a job."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def rank_process(number):
    (found,) = [child for child in multiprocessing.active_children() if child.name == f"exatwin rank {number}"]
    return found


def children(pid):
    """Processes that one has started."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(true, seconds=20.0):
    """Wait for something that is to become true."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def driver(scenario, data, told=None, **options):
    """A run in a process of its own, in a session of its own; gone when this ends."""

    def drive():
        os.setsid()
        try:
            outcome = launch(
                scenario, TrainOptions(data=data, device="cpu", **options), lambda news: None, lambda text: None
            )
            answer = outcome.stopped, [step.step for step in outcome.reports[0].steps]
        except KeyboardInterrupt:
            answer = "interrupted", []
        if told is not None:
            told.send(answer)

    process = multiprocessing.get_context("fork").Process(target=drive)
    process.start()
    ranks = []
    try:
        ranks += until(lambda: len(found := children(process.pid)) == scenario.devices and found)
        yield process, ranks
    finally:
        process.kill()
        process.join()
        until(lambda: not any(running(pid) for pid in ranks), 5.0)


# --- ranks that die ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run_with_its_name(victim, data):
    """All others are stopped within seconds."""
    killed = []

    def kill(news):
        if news.step == 2:
            rank_process(victim).kill()
            killed.append(time.monotonic())

    with pytest.raises(RankDiedError, match=rf"^rank {victim} \(pp 0, dp {victim}, cp 0, tp 0\) killed by SIGKILL$"):
        launch(small(dp=2), TrainOptions(steps=LONG, data=data, device="cpu"), kill)
    assert time.monotonic() - killed[0] < 8.0
    assert not multiprocessing.active_children()


def test_a_rank_that_fails_is_named_with_its_error(data, monkeypatch):
    """Not those that lost their connection to it."""
    whole = module.run_rank

    def fails(scenario, options, seat, tell, stop):
        def check():
            if seat.rank == 1:
                raise ValueError("a fault of its own\nwith more below")
            return stop()

        return whole(scenario, options, seat, tell, check)

    monkeypatch.setattr(module, "run_rank", fails)
    with pytest.raises(RunError, match=r"^rank 1 \(pp 1, .*\) failed: ValueError: a fault of its own$"):
        run(small(pp=2), data, 3)
    assert not multiprocessing.active_children()


def test_a_run_begins_again_from_its_last_checkpoint(data, tmp_path):
    """As often as it may, and says so."""
    notes, once = [], []

    def kill(news):
        if news.step == 5 and not once:
            once.append(news)
            rank_process(1).kill()

    outcome = launch(
        small(dp=2),
        TrainOptions(steps=8, data=data, device="cpu", checkpoint=tmp_path, checkpoint_every=1, max_restarts=1),
        kill,
        notes.append,
    )
    assert outcome.restarts == 1
    steps = outcome.reports[0].steps
    assert 0 < steps[0].step <= 6
    assert [step.loss for step in steps] == pytest.approx(run(small(), data, 8)[0][steps[0].step :], abs=1e-5)
    (note,) = notes
    assert "rank 1" in note
    assert "beginning again from the last checkpoint (1 of 1)" in note


def test_ten_kills_at_any_moment_change_nothing(data, tmp_path):
    """Of a rank or of the whole run; what is left is the last whole checkpoint, and no process."""
    rng = np.random.default_rng(5)
    scenario = small(pp=2)

    def done():
        return int(checkpoints(tmp_path)[-1].name.removeprefix("step-")) if checkpoints(tmp_path) else 0

    for number in range(10):
        before = done()
        with driver(scenario, data, steps=LONG, checkpoint=tmp_path, checkpoint_every=1) as (process, ranks):
            if number % 2:  # half of them early, the others once something is written: a busy machine gets on too
                until(lambda before=before: done() > before, 60.0)
            time.sleep(rng.uniform(0.0, 0.8))
            victim = process.pid if number % 3 == 2 else int(rng.choice(ranks))
            os.kill(victim, signal.SIGKILL)
            if victim == process.pid:
                until(lambda ranks=ranks: not any(running(pid) for pid in ranks), 5.0)
    steps = done()
    assert steps >= 5
    losses, _ = run(scenario, data, steps + 3, checkpoint=tmp_path)
    assert losses == pytest.approx(run(small(), data, steps + 3)[0][steps:], abs=1e-5)
    assert not list(tmp_path.glob("*.partial"))


def test_a_loss_that_is_no_number_ends_the_run_at_once(data, tmp_path):
    """It would be none again, so nothing begins again."""
    notes = []
    with pytest.raises(
        RunEndedError, match=r"the (loss|gradients' norm) of step \d+ is (nan|inf): lower --learning-ra"
    ):
        run(
            small(dp=2),
            data,
            50,
            learning_rate=1e30,
            checkpoint=tmp_path,
            checkpoint_every=1,
            max_restarts=3,
            note=notes.append,
        )
    assert notes == []
    assert not list(tmp_path.glob("*.partial"))
    assert not multiprocessing.active_children()


def test_ranks_can_be_spawned(data, monkeypatch):
    """As they are on GPUs, where a fork of what has looked for them cannot use them."""
    monkeypatch.setattr(module, "local_devices", lambda options: 1)
    assert len(run(small(), data, 2)[0]) == 2


# --- requests to stop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("group", [False, True], ids=["parent", "group"])
def test_a_request_stops_after_the_step_with_a_checkpoint(name, group, data, tmp_path):
    """Sent to the process, to its group, or, as timeout does, to both."""
    here, there = multiprocessing.Pipe(duplex=False)
    with driver(small(dp=2), data, there, steps=LONG, checkpoint=tmp_path, checkpoint_every=3) as (process, _):
        until(lambda: checkpoints(tmp_path))
        os.kill(process.pid, name)
        if group:
            os.killpg(process.pid, name)
        assert here.poll(15.0)
        stopped, steps = here.recv()
    assert stopped is True
    assert checkpoints(tmp_path)[-1].name == f"step-{steps[-1] + 1:08d}"
    assert not list(tmp_path.glob("*.partial"))


def test_a_second_request_ends_at_once(data, tmp_path):
    """Even where a rank hangs, and the step does not end."""
    here, there = multiprocessing.Pipe(duplex=False)
    with driver(small(dp=2), data, there, steps=LONG, checkpoint=tmp_path, checkpoint_every=3) as (process, ranks):
        until(lambda: checkpoints(tmp_path))
        os.kill(ranks[1], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGINT)
        assert not here.poll(1.0)
        os.kill(process.pid, signal.SIGINT)
        assert here.poll(3.0)
        assert here.recv() == ("interrupted", [])
        until(lambda: not any(running(pid) for pid in ranks), 3.0)


# --- the command ------------------------------------------------------------------------------------------------------

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
PROGRAM = ("-m", "exatwin")


@pytest.fixture
def program(tmp_path):
    """Starts the program, or torchrun with it, and leaves no process behind."""
    begun = []

    def start(*words, before=(), **environment):
        process = subprocess.Popen(
            [sys.executable, *before, *PROGRAM, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**ENVIRONMENT, MARK: str(tmp_path), **environment},
            start_new_session=True,
        )
        begun.append(process)
        return process

    try:
        yield start
    finally:
        for process in begun:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for pid in marked(MARK, str(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def test_ctrl_c_answers_with_what_was_measured_and_130(program, data, tmp_path):
    """A terminal sends it to all processes in the foreground."""
    folder = tmp_path / "checkpoint"
    process = program(
        *arguments(dp=2),
        f"--steps={LONG}",
        f"--data={data}",
        f"--checkpoint={folder}",
        "--checkpoint-every=2",
        "--json",
    )
    until(lambda: checkpoints(folder), 40.0)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert json.loads(out)["steps"]
    assert "stopping after this step" in err
    assert "Traceback" not in err
    assert marked(MARK, str(tmp_path)) == []


def test_no_process_outlives_a_parent_that_is_killed(program, data, tmp_path):
    """The kernel ends the ranks."""
    folder = tmp_path / "checkpoint"
    process = program(
        *arguments(dp=2), f"--steps={LONG}", f"--data={data}", f"--checkpoint={folder}", "--checkpoint-every=2"
    )
    until(lambda: checkpoints(folder), 40.0)
    assert len(marked(MARK, str(tmp_path))) == 3
    process.kill()
    until(lambda: not marked(MARK, str(tmp_path)), 5.0)
    process.communicate()


BAD = {
    "no step": (("--steps=0",), "--steps"),
    "fewer than none": (("--steps=-3",), "--steps"),
    "words for steps": (("--steps=many",), "--steps"),
    "half a step": (("--steps=1.5",), "--steps"),
    "steps without end": (("--steps=99999999999",), "--steps"),
    "no learning": (("--learning-rate=0",), "--learning-rate"),
    "unlearning": (("--learning-rate=-1",), "--learning-rate"),
    "a rate that is no number": (("--learning-rate=nan",), "--learning-rate"),
    "a rate without end": (("--learning-rate=inf",), "--learning-rate"),
    "words for a rate": (("--learning-rate=fast",), "--learning-rate"),
    "a seed below 0": (("--seed=-1",), "--seed"),
    "a seed that is too large": (("--seed=2147483648",), "--seed"),
    "no steps between": (("--checkpoint-every=0",), "--checkpoint-every"),
    "fewer restarts than none": (("--max-restarts=-1",), "--max-restarts"),
    "too many restarts": (("--max-restarts=1001",), "--max-restarts"),
    "an unknown device": (("--device=tpu",), "--device"),
    "an unknown option": (("--lr=1",), "--lr"),
    "a file for checkpoints": (("--checkpoint={file}",), "is no folder"),
    "a folder below a file": (("--checkpoint={file}/x",), "cannot be written"),
    "a folder where none can be": (("--checkpoint=/proc/checkpoint",), "cannot be written"),
    "a trace in no folder": (("--profile=/nowhere/trace.json",), "there is no folder"),
    "a folder for a trace": (("--profile={folder}",), "is a directory"),
    "a device for a trace": (("--profile=/dev/null",), "is no file"),
    "an answer in no folder": (("--output=/nowhere/answer.json",), "there is no folder"),
    "missing data": (("--data={folder}/none",), "none"),
    "empty data": (("--data={empty}",), "empty"),
    "short data": (("--data={file}",), "token"),
    "a small vocabulary": (("--set=model.vocab=20",), "vocab"),
    "a missing scenario's key": (("--set=training.lr=1",), "training.lr"),
    "more ranks than layers": (("--set=layout.pp=8", "--set=devices=8"), "layout.pp"),
    "what the trainer does not run": (("--set=layout.graphs=step",), "layout.graphs=none"),
}


@pytest.mark.parametrize(("words", "told"), BAD.values(), ids=BAD)
def test_bad_input_is_one_message_and_2(words, told, data, tmp_path, capsys):
    """And nothing is written."""
    (tmp_path / "file").write_text("short")
    (tmp_path / "empty").write_text("")
    places = {"folder": tmp_path, "file": tmp_path / "file", "empty": tmp_path / "empty"}
    words = [word.format(**places) for word in words]
    given = [] if any(word.startswith("--data") for word in words) else [f"--data={data}"]
    assert command([*arguments(), "--steps=2", *given, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("error:") == 1
    assert told in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_a_folder_is_no_scenario(tmp_path, capsys):
    """Nor is a file that is missing."""
    assert command(["train", str(tmp_path)]) == 2
    assert command(["train", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err.count("error:") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_told(data, capsys):
    """With the option that does without."""
    assert command([*arguments(), f"--data={data}", "--device=cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_more_ranks_than_memory_are_refused_with_the_figure(data, monkeypatch, capsys):
    """Unless somebody insists."""
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 0.25 * 2**30)
    words = [*arguments(), f"--data={data}", "--steps=2", "--device=cpu", "--quiet"]
    assert command(words) == 2
    assert "more than the 0.2 GiB that this host has free" in capsys.readouterr().err
    assert command([*words, "--force"]) == 0


@pytest.mark.parametrize(
    ("package", "words"), [("torch", ()), ("tensorboard", ("--tensorboard=events",))], ids=["torch", "tensorboard"]
)
def test_a_missing_package_is_told_with_how_to_get_it(package, words, data, tmp_path):
    """Before anything is begun."""
    lines = (
        "import sys",
        f"sys.modules[{package!r}] = None",
        "from exatwin.cli import main",
        "main()",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *arguments(), f"--data={data}", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {'--tensorboard: ' if words else ''}{package} is not installed")
    assert "pip install" in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- the profiler -----------------------------------------------------------------------------------------------------


def test_profiled_steps_are_traced_and_not_counted(data, tmp_path):
    """What the profiler costs is said."""
    trace = tmp_path / "trace.json"
    scenario = small(dp=2)
    _, outcome = run(scenario, data, 7, profile=trace)
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    measured = measurement(scenario, outcome.reports)
    assert not any(step.counted for step in measured.steps[-3:])
    assert any(step.counted for step in measured.steps[:-3])
    assert measured.profiler_overhead > -0.9


def test_a_run_that_is_watched_all_the_time_tells_no_overhead(data, tmp_path):
    """There is nothing to compare with."""
    scenario = small()
    _, outcome = run(scenario, data, 2, profile=tmp_path / "trace.json")
    assert measurement(scenario, outcome.reports).profiler_overhead is None


def test_a_trace_is_whole_or_not_there(data, tmp_path, monkeypatch):
    """A disk that fills leaves the one that was there before."""
    trace = tmp_path / "trace.json"
    trace.write_text("before")

    def half(profiler, path):
        Path(path).write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", half)
    with pytest.raises(RunError, match=r"trace\.json could not be written: .*No space left on device"):
        run(small(), data, 4, profile=trace)
    assert trace.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


# --- joining a job ----------------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "MASTER_ADDR": "node"}


def test_the_environment_says_whether_somebody_else_started_this_rank():
    """torchrun's words, Slurm's, or none."""
    assert joined({}) is None
    assert joined({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    there = joined(TORCHRUN)
    assert (there.rank, there.world, there.local_rank, there.port, there.serves) == (1, 4, 1, 29500, False)
    assert joined({**TORCHRUN, "RANK": "0"}).serves
    assert not joined({**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}).serves
    there = joined(SLURM)
    assert (there.rank, there.world, there.local_rank, there.address, there.port) == (3, 4, 1, "node", 20007)
    assert joined({**SLURM, "MASTER_ADDR": "", "SLURM_JOB_NODELIST": "one,two"}).address == "one"


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {**TORCHRUN, "RANK": "x"},
        {**TORCHRUN, "WORLD_SIZE": "-1"},
        {**TORCHRUN, "RANK": "4"},
        {**TORCHRUN, "MASTER_PORT": "0"},
        {**TORCHRUN, "MASTER_PORT": "http"},
        {**TORCHRUN, "MASTER_PORT": "70000"},
        {**SLURM, "SLURM_NTASKS": "four"},
        {**SLURM, "SLURM_LOCALID": ""},
        {**SLURM, "SLURM_JOB_ID": "x"},
        {**SLURM, "MASTER_PORT": "x"},
        {**SLURM, "MASTER_ADDR": ""},
    ],
    ids=str,
)
def test_a_broken_environment_is_refused(environment):
    """With the variable's name."""
    with pytest.raises(InputError, match=r"^environment: .*(RANK|rank|WORLD|MASTER|SLURM)"):
        joined(environment)


def test_a_job_of_another_size_is_refused(data, monkeypatch, capsys):
    """Before it waits for anybody."""
    for name, value in {**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert command([*arguments(dp=2), f"--data={data}"]) == 2
    assert "4 ranks were started, but the scenario has devices=2" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(data, monkeypatch, capsys):
    """By the rank that would listen there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert command([*arguments(dp=2), f"--data={data}"]) == 2
    message = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be used to meet" in message
    assert "set MASTER_PORT to a free port" in message


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return str(one.getsockname()[1])


def test_ranks_that_srun_starts_join_and_the_first_speaks(program, data):
    """Each with its number in the environment."""
    port = free_port()
    environment = {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = (*arguments(pp=2), "--steps=3", f"--data={data}", "--json", "--device=cpu")
    ranks = [program(*words, **environment, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    (first, told), (second, quiet) = (rank.communicate(timeout=60) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], told + quiet
    losses = [step["loss"] for step in json.loads(first)["steps"]]
    assert losses == pytest.approx(run(small(), data, 3)[0], abs=1e-5)
    assert (second, quiet) == ("", "")


def test_torchrun_starts_again_from_the_checkpoint(program, data, tmp_path):
    """A rank is killed once; the answer comes once."""
    folder = tmp_path / "checkpoint"
    before = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}")
    steps = 30
    process = program(
        *arguments(dp=2),
        f"--steps={steps}",
        f"--data={data}",
        f"--checkpoint={folder}",
        "--checkpoint-every=1",
        "--output=answer.json",
        before=before,
    )
    until(lambda: checkpoints(folder), 60.0)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert 0 < answer["steps"][0]["step"] < steps
    assert answer["steps"][-1]["step"] == steps - 1
    assert out.count("where the step goes") <= 1
    assert marked(MARK, str(tmp_path)) == []


def test_a_joined_rank_hears_requests_though_it_is_in_a_collective():
    """The first asks, its double is the same one, and a later one ends the process with 130."""
    here, there = multiprocessing.Pipe(duplex=False)

    def listen():
        with module._heard_in_collectives() as asked:
            there.send("ready")
            asked.wait(10)
            there.send("asked")
            time.sleep(30)

    process = multiprocessing.get_context("fork").Process(target=listen)
    process.start()
    try:
        assert here.poll(5)
        here.recv()
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGTERM)
        assert here.poll(5)
        here.recv()
        assert process.is_alive()
        time.sleep(module.SAME_S + 0.2)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGTERM)
        process.join(5)
        assert process.exitcode == 130
    finally:
        process.kill()
        process.join()
