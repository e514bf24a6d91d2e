"""The command as its users meet it: answers, exit codes, and one message for each mistake."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from exatwin import __version__
from exatwin.cli import KINDS, SCHEMAS, run
from exatwin.report.show import names
from exatwin.scenarios.published import published_runs
from exatwin.scenarios.scenario import load_scenario, scenario_from_document

QUICK = "frontier-22b"
GOOD = """\
name: mine
machine: frontier
devices: 64
model: gpt-22b
training: {seq_len: 2048, global_batch: 64, precision: bf16}
layout: {tp: 2, pp: 4, recompute: full}
"""


def program(*arguments, **options):
    """The command in a process of its own."""
    settings = {"capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run([sys.executable, "-m", "exatwin", *arguments], check=False, **settings)


def refused(capsys, *arguments):
    """The one message of a call that must end with exit code 2 and print nothing else."""
    assert run(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    return err


def test_help_is_instant():
    """Neither the simulation nor what it needs is imported before a command asks for it."""
    heavy = ("simpy", "networkx", "numpy", "pydantic", "torch", "scipy", "rich", "yaml")
    code = "import sys; from exatwin.cli import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "simulate" in done.stdout
    assert not set(heavy) & {name.split(".")[0] for name in done.stderr.split()}


def test_the_module_is_the_command():
    done = program("--version")
    assert (done.returncode, done.stdout) == (0, f"exatwin {__version__}\n")
    assert program("-h").stdout == program("--help").stdout == program().stdout


@pytest.mark.parametrize("command", ["simulate", "show", "schema", "validate", "doctor", "completion"])
def test_every_command_explains_itself(command, capsys):
    assert run([command, "-h"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: exatwin {command}")


@pytest.mark.parametrize("name", names("scenarios"))
def test_every_bundled_scenario_gets_a_whole_answer(name, capsys):
    code = run(["simulate", name, "--json", "--fidelity", "recurrence"])
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert code == (3 if answer["memory"]["verdict"] == "does not fit" else 0)
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_s"])
    for stage in answer["memory"]["stages"]:
        assert sum(stage["parts"].values()) == pytest.approx(stage["peak_bytes"])
    assert (answer["exatwin_version"], answer["fidelity"]) == (__version__, "recurrence")
    assert name in err, "the table goes to stderr"


def test_the_contract_of_the_document(capsys):
    run(["simulate", "frontier-1t", "--json", "-q"])
    out, err = capsys.readouterr()
    assert err == ""
    answer = json.loads(out)
    assert set(answer) >= {
        *("schema_version", "scenario", "step_s", "samples_per_s", "tokens_per_s", "tflops_per_device", "mfu", "hfu"),
        *("network", "links", "placement", "perturbed", "engine"),
        *("breakdown_s", "comm", "memory", "interval", "campaign", "calibration", "fidelity", "warnings"),
        "exatwin_version",
    }
    parts = "compute recompute tp_comm pp_comm dp_comm cp_comm ep_comm bubble optimizer"
    assert set(answer["breakdown_s"]) >= set(parts.split())
    assert set(answer["comm"][0]) >= {"group", "op", "bytes", "count", "busy_s", "exposed_s"}
    assert set(answer["campaign"]) == {"steps", "days", "node_hours", "device_hours"}
    stage = answer["memory"]["stages"][0]
    assert set(stage["parts"]) == {"parameters", "gradients", "optimizer", "activations", "buffers", "overhead"}
    assert scenario_from_document(answer["scenario"]).devices == 3072


def test_the_same_question_gets_the_same_bytes(capsys):
    answers = []
    for _ in range(2):
        run(["simulate", QUICK, "--json", "-q"])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_the_table_is_the_answer_without_json(capsys):
    assert run(["simulate", "frontier-1t"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("3,072 GCDs = 384 nodes", "61.2", "HFU", "MFU", "node-hours", "memory: fits", "recomputation"):
        assert words in out


def test_overrides_change_the_question(capsys):
    run(["simulate", QUICK, "--set", "layout.micro_batch=2", "--set", "training.tokens=1T", "--json", "-q"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["scenario"]["layout"]["micro_batch"] == 2
    assert answer["campaign"]["steps"] > 0


def test_a_layout_that_does_not_fit_is_answered_in_full(capsys):
    assert run(["simulate", "frontier-1t", "--set", "layout.recompute=none", "--fidelity", "recurrence"]) == 3
    out, err = capsys.readouterr()
    assert "does not fit" in out
    assert "where the step goes" in out
    assert err == ""


def test_a_file_of_ones_own_is_simulated(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert run(["simulate", str(path), "-q", "-o", str(tmp_path / "answer.json")]) == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads((tmp_path / "answer.json").read_text())["scenario"]["name"] == "mine"
    assert run(["simulate", str(path), "-q", "-o", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "answer.json").read_text()


BAD_FILES = {
    "empty": (b"", "is empty"),
    "only a comment": (b"# nothing\n", "nothing where a mapping"),
    "truncated": (b"name: mine\nlayout: {tp: 8, pp", "is not valid YAML"),
    "binary": (b"\x7fELF\x02\x01\x00\x00\xff", "is a binary file"),
    "latin-1": ("name: gr\u00fcn".encode("latin-1"), "is not UTF-8"),
    "a list": (b"- 1\n- 2\n", "a list where a mapping"),
    "a number": (b"42\n", "a number where a mapping"),
    "a key twice": (GOOD.encode() + b"devices: 8\n", "stands twice"),
    "an unknown key": (GOOD.replace("recompute", "recompte").encode(), "did you mean recompute?"),
    "a wrong type": (GOOD.replace("tp: 2", "tp: eight").encode(), "layout.tp"),
    "a float for a count": (GOOD.replace("tp: 2", "tp: 2.0").encode(), "layout.tp"),
    "a negative number": (GOOD.replace("pp: 4", "pp: -4").encode(), "layout.pp"),
    "an absurd number": (GOOD.replace("64\n", "64000000000000\n", 1).encode(), "devices"),
    "not a number": (GOOD.replace("global_batch: 64", "global_batch: .nan").encode(), "training.global_batch"),
    "an unknown machine": (GOOD.replace("frontier", "frontear").encode(), "did you mean frontier?"),
    "an unknown model": (GOOD.replace("gpt-22b", "gpt-23b").encode(), "did you mean gpt-22b?"),
    "a missing field": (GOOD.replace("machine: frontier\n", "").encode(), "machine: is needed"),
    "deep nesting": (b"[" * 100_000, "is not valid YAML"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_gets_one_clear_message(kind, tmp_path, capsys):
    content, words = BAD_FILES[kind]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    message = refused(capsys, "simulate", str(path))
    assert words in message
    assert str(path) in message
    assert len(message.splitlines()) == 1


def test_what_is_no_file_gets_one_clear_message(tmp_path, capsys):
    assert "no such file" in refused(capsys, "simulate", str(tmp_path / "none.yaml"))
    assert "is a directory" in refused(capsys, "simulate", f"{tmp_path}/")
    assert "did you mean frontier-1t?" in refused(capsys, "simulate", "frontier-1")
    assert "name" in refused(capsys, "simulate", "")


def test_json_and_toml_are_read_too(tmp_path, capsys):
    import yaml

    document = yaml.safe_load(GOOD)
    (tmp_path / "mine.json").write_text(json.dumps(document))
    assert run(["simulate", str(tmp_path / "mine.json"), "-q"]) == 0
    (tmp_path / "cut.json").write_text(json.dumps(document)[:40])
    assert "is not valid JSON" in refused(capsys, "simulate", str(tmp_path / "cut.json"))
    (tmp_path / "cut.toml").write_text("name = ")
    assert "is not valid TOML" in refused(capsys, "simulate", str(tmp_path / "cut.toml"))


def test_all_violations_come_at_once(capsys):
    message = refused(capsys, "simulate", "frontier-1t", "--set", "layout.tp=7", "--set", "training.global_batch=9601")
    assert "layout.tp" in message
    assert "training.global_batch" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], "Missing argument"),
        (["simulat"], "simulate"),
        (["simulate", QUICK, "--frob"], "No such option"),
        (["simulate", QUICK, "--fidelity", "dse"], "did you mean des?"),
        (["simulate", QUICK, "--network", "sol"], "did you mean solo?"),
        (["simulate", "frontier-1t", "--fidelity", "des-per-rank"], "use des-exact"),
        (["simulate", QUICK, "--set", "layout.tp"], "layout.tp"),
        (["simulate", QUICK, "--set", "layout.microbatch=4"], "did you mean micro_batch?"),
        (["simulate", QUICK, "--set", "layout.tp=[1"], "layout.tp"),
        (["simulate", QUICK, "--calibration", "mi250"], "calibration"),
        (["simulate", QUICK, "-o", "/nowhere/answer.json"], "there is no folder"),
        (["simulate", QUICK, "-o", "/tmp"], "is a directory"),
        (["show", "machine"], "did you mean machines?"),
        (["show", "machines", "fronteer"], "did you mean frontier?"),
        (["show", "schedules", "1fb"], "did you mean 1f1b?"),
        (["show", "published", "nothing"], "nothing"),
        (["schema", "scenarios"], "did you mean scenario?"),
        (["completion", "zish"], "did you mean zsh?"),
    ],
)
def test_a_wrong_word_gets_one_clear_message(arguments, words, capsys):
    message = refused(capsys, *arguments)
    assert words in message
    assert len(message.splitlines()) == 1


IMPOSSIBLE = {
    "perturb.noise=1": "perturb.noise: unknown key",
    "perturb.nics=[{node: 0, nic: nic0, rate: 0.5}]": "a node has no nic nic0; known: hsn0",
    "perturb.nics=[{node: 48, nic: hsn0, rate: 0.5}]": "there is no node 48; the job has nodes 0 to 47",
    "perturb.nics=[{node: 0, nic: hsn0, rate: 1.5}]": "perturb.nics.0.rate",
    "perturb.devices=[{rank: 384, speed: 0.5}]": "there is no rank 384; the job has ranks 0 to 383",
    "perturb.devices=[{speed: 0.5}]": "needs a rank or a node, and not both",
    "perturb.devices=[{rank: 0, speed: 0}]": "perturb.devices.0.speed",
    "perturb.links=[{node: 0, between: [0, 3], rate: 0.5}]": "link 0 - 3 of node 0 is not there",
    "perturb.links=[{groups: [0, 77], rate: 0.5}]": "the groups are 0 to 76",
    "perturb.links=[{groups: [40, 41], rate: 0.5}]": "the job has no node in group 40 or 41",
    "perturb.links=[{groups: [0, 0], rate: 0.5}]": "has to name two groups",
    "placement.nodes=sprad": "placement.nodes: input should be 'contiguous' or 'spread' or a list",
    "placement.nodes=[a, 2]": "placement.nodes.0: input should be a valid integer",
    "perturb.background=[{source: 1, target: 1, rate: 1 GB/s}]": "starts and ends at the same node",
    "perturb.background=[{source: 0, target: 1, rate: 1}]": "has no unit",
    "perturb.jitter={spread: -1}": "perturb.jitter.spread",
    "perturb.links=[{node: 0, rate: 0.5}]": "needs node and between, or groups, or ends, and one of these alone",
    "perturb.links=[{ends: [a, b], rate: 0.5}]": "perturb.links.0: fabric link a - b is not there",
    "collectives.dp.all_reduce=tre": "did you mean tree?",
    "collectives.dp.all_reduce=torus": "collectives.dp.all_reduce: torus cannot run here",
    "collectives.pp.send=ring": "collectives.pp: unknown key",
    "placement.order=tp-pp": "did you mean tp-pp-dp?",
    "placement.nodes=[0, 1]": "lists 2 nodes, but the ranks fill 48",
    "placement.shape=[4, 4, 3]": "is for a torus",
    "placement.device_order=[0, 1]": "has to name each of the 8 GCDs of a node once",
    "placement.node_file=/nowhere": "no such file",
}


@pytest.mark.parametrize("override", IMPOSSIBLE)
def test_a_placement_or_perturbation_that_cannot_be_gets_one_clear_message(override, capsys):
    message = refused(
        capsys,
        "simulate",
        "frontier-175b",
        "--set",
        "devices=384",
        "--set",
        "layout.dp=null",
        "--set",
        "training.global_batch=960",
        "--set",
        override,
    )
    assert IMPOSSIBLE[override] in message
    assert len(message.splitlines()) == 1


def test_a_torus_shape_that_does_not_hold_the_job_is_told_the_nearest(capsys):
    message = refused(capsys, "simulate", "fugaku-30b", "--set", "placement.shape=[4, 4, 4]")
    assert "4x4x4 makes 64 nodes, but the job has 1536; nearest: 8x12x16" in message


def test_more_ranks_than_devices_are_refused(capsys):
    message = refused(capsys, "simulate", "frontier-1t", "--set", "devices=79360", "--set", "layout.dp=null")
    assert "devices=79360 are more than the 78848 GCDs of frontier" in message


def test_contention_can_be_switched_off(capsys):
    """Alone on the links nothing takes longer."""
    steps = {}
    for mode in ("shared", "solo"):
        assert run(["simulate", "frontier-1t", "--network", mode, "--fidelity", "des-exact", "--json", "-q"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["network"] == mode
        steps[mode] = answer["step_s"]
    assert steps["solo"] <= steps["shared"]


@pytest.mark.parametrize("kind", KINDS)
def test_everything_bundled_can_be_shown(kind, capsys):
    assert run(["show", kind]) == 0
    listing = capsys.readouterr().out
    for name in names(kind):
        assert name in listing
        assert run(["show", kind, name]) == 0
        assert capsys.readouterr().out
        assert run(["show", kind, name, "--json", "-q"]) == 0
        json.loads(capsys.readouterr().out)


def test_every_figure_of_a_machine_is_shown_with_its_source(capsys):
    run(["show", "machines", "frontier"])
    out = capsys.readouterr().out
    assert "50 GB/s" in out
    assert "olcf-frontier-guide" in out
    assert "9,856 nodes" in out


@pytest.mark.parametrize("kind", SCHEMAS)
def test_schemas_are_schemas(kind, capsys):
    assert run(["schema", kind]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", names("scenarios"))
def test_bundled_scenarios_obey_the_schema(name, capsys):
    from exatwin.topology.files import read_document

    run(["schema", "scenario"])
    schema = json.loads(capsys.readouterr().out)
    document, _ = read_document(name, "exatwin.scenarios", "library", "scenario")
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)


def test_the_doctor_finds_this_installation_whole(capsys):
    assert run(["doctor", "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert {"python", "torch", "terminal", "bundled machines", "a prediction"} <= {
        check["name"] for check in document["checks"]
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(shell, capsys):
    assert run(["completion", shell]) == 0
    assert "_EXATWIN_COMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("exatwin sim", "simulate"),
        ("exatwin simulate frontier-1", "frontier-1t"),
        ("exatwin show mach", "machines"),
        ("exatwin show models gpt-1", "gpt-1t"),
        ("exatwin simulate frontier-1t --fidelity des-", "des-exact"),
        ("exatwin simulate frontier-1t --network so", "solo"),
        ("exatwin show topology fug", "fugaku"),
    ],
)
def test_the_shell_completes_names(words, offered):
    environment = os.environ | {
        "_EXATWIN_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    assert offered in program(env=environment).stdout


@pytest.mark.parametrize("columns", ["20", "40", "80"])
def test_tables_keep_to_the_terminal(columns):
    for arguments in (
        ["simulate", "frontier-1t"],
        ["show", "machines", "frontier"],
        ["show", "topology", "aurora"],
        ["show", "topology"],
        ["doctor"],
    ):
        done = program(*arguments, env=os.environ | {"COLUMNS": columns})
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= max(int(columns), 40)


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1", "TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False)],
)
def test_colour_is_for_terminals(environment, coloured):
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    assert ("\x1b[" in program("simulate", QUICK, env=plain | environment).stdout) == coloured


def test_an_ascii_terminal_gets_an_answer():
    done = program("simulate", QUICK, env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "##" in done.stdout


def test_an_internal_error_is_one_line_and_a_traceback_on_request(monkeypatch, capsys):
    monkeypatch.setattr("exatwin.sim.predict.predict", lambda *_: 1 / 0)
    assert run(["simulate", QUICK]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: internal: ZeroDivisionError: division by zero")
    assert len(message.splitlines()) == 1
    assert run(["--traceback", "simulate", QUICK]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("EXATWIN_TRACEBACK", "1")
    assert run(["simulate", QUICK]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_number_that_json_cannot_hold_is_never_printed(monkeypatch, capsys):
    monkeypatch.setattr("exatwin.scenarios.result.Prediction.document", lambda *_: {"step_s": float("nan")})
    assert run(["simulate", QUICK, "--json"]) == 1
    assert capsys.readouterr().out == ""


def test_an_interrupt_ends_quietly():
    command = [sys.executable, "-m", "exatwin", "simulate", "frontier-1t", "--fidelity", "des-exact"]
    command += ["--set", "training.global_batch=96000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "interrupted"


def processes_of(group):
    """Processes of a process group, those that have ended and that nobody has asked for aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            found += [int(path.parent.name)] if int(its_group) == group and state not in "ZX" else []
    return found


def waits_for(condition, seconds):
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells processes by /proc")
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["to the parent alone", "to all, as Ctrl-C does"])
def test_an_interrupt_ends_the_processes_of_a_validation_at_once(send):
    command = [sys.executable, "-m", "exatwin", "validate", "-q", "--jobs", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert waits_for(lambda: len(processes_of(process.pid)) >= 3 or process.poll() is not None, 60)
        time.sleep(0.5)
        send(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=10)  # alone they take half a minute more
        assert (process.returncode, out, err.strip()) == (130, "", "interrupted")
        assert waits_for(lambda: not processes_of(process.pid), 5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


@pytest.mark.parametrize("arguments", [["simulate", QUICK, "--json"], ["show", "machines"]])
def test_a_reader_that_leaves_gets_no_traceback(arguments):
    read, write = os.pipe()
    os.close(read)
    done = program(*arguments, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_full_disk_is_said():
    with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
        done = program("show", "machines", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device\n"


def test_a_variable_sets_an_option_and_the_command_line_wins(monkeypatch, capsys):
    monkeypatch.setenv("EXATWIN_SIMULATE_FIDELITY", "recurrence")
    run(["simulate", QUICK, "--json", "-q"])
    assert json.loads(capsys.readouterr().out)["fidelity"] == "recurrence"
    run(["simulate", QUICK, "--json", "-q", "--fidelity", "des"])
    assert json.loads(capsys.readouterr().out)["fidelity"] == "des"


def test_a_published_run_of_a_series_is_shown_and_becomes_a_scenario(tmp_path, capsys):
    """What was measured stands above the scenario; the file asks the same as the row."""
    file = tmp_path / "mine.yaml"
    assert run(["show", "published", "mtnlg-003", "-o", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "44.4" in shown and "mt-nlg" in shown
    (row,) = (row for row in published_runs("mt-nlg") if row.id == "mtnlg-003")
    asked, written = row.ask().document(), load_scenario(str(file)).document()
    assert asked == written
    assert run(["show", "published", "mtnlg-3"]) == 2
    assert "mtnlg-00" in capsys.readouterr().err


def test_a_published_run_of_a_bundled_scenario_is_written_as_one_too(tmp_path, capsys):
    """With its own layout and its own measurement; one that no scenario can ask is refused, nothing is written."""
    file = tmp_path / "mine.yaml"
    assert run(["show", "published", "fugaku-30b-083", "-o", str(file)]) == 0
    written = load_scenario(str(file))
    assert (written.devices, written.layout.dp, written.measured) == (768, 4, "fugaku-30b-083")
    other = tmp_path / "other.yaml"
    assert run(["show", "published", "lumi-poro-34b-1024gcd", "-o", str(other)]) == 2
    assert "no bundled scenario describes this run" in capsys.readouterr().err
    assert not other.exists()
