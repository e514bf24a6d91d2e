"""A real run for people: on the screen and while it goes on."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from exatwin.cli import cli, run
from exatwin.report.terminal import Screen, open_console, print_parts
from exatwin.report.training import measurement_view, news_words, training_on
from exatwin.scenarios.result import (
    Breakdown,
    CommRecord,
    FlopRates,
    Interval,
    MeasuredStep,
    Measurement,
    Memory,
    MemoryParts,
    Spread,
    StageMemory,
)
from exatwin.scenarios.scenario import load_scenario

MIB = 2.0**20
GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SCENARIO = load_scenario("local-gpt-10m")
NEWS = {"step": 4, "steps": 20, "loss": 3.14159, "tokens_per_s": 12345.6, "memory_bytes": 96.5 * MIB}


def news(**changes):
    """What rank 0 tells of a step, as `StepNews`, which lives beside torch."""
    return SimpleNamespace(**NEWS | changes)


def stage(number, peak_mib):
    parts = MemoryParts(parameters=20 * MIB, gradients=20 * MIB, optimizer=40 * MIB, activations=(peak_mib - 80) * MIB)
    peak = peak_mib * MIB
    return StageMemory(number, peak, peak, peak, 0.0, "the run", parts, 80 * MIB)


MEASURED = Measurement(
    scenario=SCENARIO.document(),
    step_s=2.0,
    samples_per_s=8.0,
    tokens_per_s=1024.0,
    tflops_per_device=FlopRates(0.05e12, 0.05e12),
    mfu=0.5,
    hfu=0.5,
    breakdown_s=Breakdown(compute=1.5, pp_comm=0.01, dp_comm=0.2, bubble=0.25, optimizer=0.03, other=0.01),
    slowest_stage=1,
    comm=(
        CommRecord("dp", "all_reduce", "as run", 20 * MIB, 1, 0.25, 0.2),
        CommRecord("pp", "send", "as run", 4 * 320 * 1024, 4, 0.01, 0.01),
        CommRecord("tp", "all_gather", "as run", 0.0, 0, 0.0, 0.0),
    ),
    stages=(),
    memory=Memory("fits", 8e9, 0.0, 0.0, (stage(0, 125.25), stage(1, 104.0))),
    interval=Interval(0.8, (1.9, 2.2), "the middle 80 % of 3 steps"),
    spread_s=Spread(2.0, 1.9, 2.2, 0.071),
    steps=tuple(MeasuredStep(n, 5.5 - n, 1.0, 2.0, 0.001, False, counted=n > 0) for n in range(4)),
    warmup_steps=1,
    data_s=0.001,
    noise_scale=None,
    profiler_overhead=None,
    ranks=(),
    environment={"torch": "2.13.0", "backend": "gloo", "cores": 2, "hosts": {"a": 0.5, "b": 3.25}},
)


def shown(monkeypatch, width=80, measured=MEASURED, encoding="utf-8"):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    screen = Screen(width, encoding == "utf-8")
    print_parts(open_console(stream), [measurement_view(measured, SCENARIO, screen)])
    stream.seek(0)
    return stream.read()


def figures(text, name):
    """What stands after a name at the start of a line."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_a_measurement_is_told_with_its_spread_and_its_host(monkeypatch):
    text = shown(monkeypatch)
    assert text.startswith("local-gpt-10m\n  gpt-10m, 9.99M parameters\n  tp 1, pp 2, dp 2, 1f1b, fp32")
    assert "  4 ranks on 2 hosts: torch 2.13.0, gloo, load 3.2 on 2 cores\n" in text
    assert figures(text, "step") == ["2.00", "s"]
    assert figures(text, "tokens/s") == ["1,024"]
    assert figures(text, "loss, first step") == ["5.5000"]
    assert figures(text, "loss, last step") == ["2.5000"]
    assert figures(text, "wait for data") == ["1.00", "ms"]
    words = " ".join(text.split())
    assert "median of 3 of 4 steps (1 of warm-up); 80 % of them within 1.90 s to 2.20 s, they vary by 7.1%" in words
    assert "noise scale" not in text
    assert "warning" not in text


def test_a_breakdown_shows_the_parts_that_there_were(monkeypatch):
    """A part of 0 s is left out; the shares are of the step."""
    text = shown(monkeypatch)
    assert figures(text, "compute")[:4] == ["1.50", "s", "75.0", "%"]
    assert figures(text, "pipeline bubble")[:4] == ["250.00", "ms", "12.5", "%"]
    assert "tensor parallel" not in text
    assert "recomputation" not in text
    assert "the busiest rank, of stage 1" in text


def test_communication_is_told_by_group_and_operation(monkeypatch):
    """Bytes are of one call; what ran no more in the steps that count divides by nothing."""
    text = shown(monkeypatch)
    assert figures(text, "dp all-reduce") == ["1", "20.0", "MiB", "250.00", "ms", "200.00", "ms"]
    assert figures(text, "pp send") == ["4", "320.0", "KiB", "10.00", "ms", "10.00", "ms"]
    assert figures(text, "tp all-gather")[0] == "0"
    assert "\ncommunication" not in shown(monkeypatch, measured=replace(MEASURED, comm=()))


def test_memory_is_told_by_stage(monkeypatch):
    lines = shown(monkeypatch).splitlines()
    (head,) = [number for number, line in enumerate(lines) if line.startswith("memory, stage")]
    assert lines[head].split()[2:] == ["peak", "weights", "grads", "optim.", "activ."]
    assert lines[head + 1].split() == ["0", "125.2", "MiB", "20.0", "MiB", "20.0", "MiB", "40.0", "MiB", "45.2", "MiB"]
    assert lines[head + 2].split()[:3] == ["1", "104.0", "MiB"]


def test_what_only_some_runs_know_is_told_where_it_is_known(monkeypatch):
    told = replace(MEASURED, noise_scale=1234.56, profiler_overhead=0.34, warnings=("it began again 1 times", "[x]"))
    text = shown(monkeypatch, measured=told)
    assert figures(text, "gradient noise scale, sequences") == ["1,234.6"]
    assert figures(text, "profiled steps were slower by") == ["34.0", "%"]
    assert "warning: it began again 1 times\nwarning: [x]\n" in text


def test_a_host_that_tells_no_load_is_told_without(monkeypatch):
    told = replace(MEASURED, environment=MEASURED.environment | {"hosts": {"a": None}})
    assert "  4 ranks on 1 host: torch 2.13.0, gloo\n" in shown(monkeypatch, measured=told)


@pytest.mark.parametrize("width", [40, 60, 75, 76, 80, 100])
def test_a_measurement_fits_its_terminal(monkeypatch, width):
    """Bars and the lesser columns go first; no line is longer, and none has colour."""
    text = shown(monkeypatch, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    assert ("█" in text) == (width >= 76)
    assert (" busy " in text) == (width >= 76)
    assert ("weights" in text) == (width >= 76)
    assert "2.00 s" in text
    assert "75.0 %" in text


def test_an_ascii_terminal_gets_ascii_bars(monkeypatch):
    text = shown(monkeypatch, encoding="ascii")
    assert text.isascii()
    assert "####" in text


# --- while it goes on -------------------------------------------------------------------------------------------------


def test_a_step_is_one_line():
    assert news_words(news()) == "step 5/20  loss 3.1416  12,346 tokens/s  96.5 MiB"


def test_on_a_stream_that_is_no_terminal_a_line_comes_now_and_then(monkeypatch):
    """The first step, one in ten seconds, and the last; notes at once."""
    clock = iter([100.0, 104.0, 109.9, 110.0, 115.0])
    monkeypatch.setattr("exatwin.report.training.time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    with training_on(stream) as (tell, note):
        tell(news(step=0))
        tell(news(step=1))
        tell(news(step=2))
        note("stopping after this step")
        tell(news(step=3))
        tell(news(step=19))
    words = [" ".join(line.split()[:2]) for line in stream.getvalue().splitlines()]
    assert words == ["step 1/20", "stopping after", "step 4/20", "step 20/20"]


def test_a_quiet_run_says_nothing():
    stream = io.StringIO()
    with training_on(stream, quiet=True) as (tell, note):
        tell(news())
        note("stopping after this step")
    assert stream.getvalue() == ""


class Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    def isatty(self):
        return True


def test_on_a_terminal_a_bar_goes_with_the_steps(monkeypatch):
    """Square brackets of a note are no markup."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with training_on(stream) as (tell, note):
        tell(news())
        note("rank 1 [pp 0] began again")
    assert "rank 1 [pp 0] began again" in stream.getvalue()
    assert "step 5/20" in stream.getvalue()


# --- what the guides say of it ----------------------------------------------------------------------------------------


def names_on(text):
    """The lines of a screen before their figures: headings, and the names of rows."""
    lines = (line.split("  ")[0] if line[:1].strip() else line.strip() for line in text.splitlines())
    return [line for line in lines if line]


def test_the_guides_screen_is_of_the_run_that_it_names(capsys):
    """Times are of another day; what was asked and the names of the rows are not."""
    pytest.importorskip("torch")
    page = (GUIDES / "training.md").read_text(encoding="utf-8")
    screen = page.partition("    local-gpt-10m\n")[2].partition("\n\n[")[0].replace("\n    ", "\n")
    shown = f"local-gpt-10m\n{screen.removeprefix('    ')}"
    assert "exatwin train local-gpt-10m " in page
    assert run(["train", "local-gpt-10m", "--steps", "2", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert shown.splitlines()[:4] == printed.splitlines()[:4]
    (told,), (found,) = (figures(text, "loss, first step") for text in (shown, printed))
    assert float(told) == pytest.approx(float(found), abs=0.1)  # the text is that of the Python that runs
    rows = [name for name in names_on(shown) if name[0].islower() and not any(digit in name for digit in "0123456789")]
    assert {"step", "compute", "pipeline bubble", "where the step goes"} < set(rows)
    assert set(rows) <= set(names_on(printed))


def test_every_option_of_the_command_is_in_its_guide():
    page = (GUIDES / "command-line.md").read_text(encoding="utf-8")
    section = page.partition("## Options of `train`")[2].partition("\n## ")[0]
    told = {line.split("`")[1].split()[0] for line in section.splitlines() if line.startswith("| `")}
    options = {option for parameter in cli.commands["train"].params for option in parameter.opts if option[:2] == "--"}
    assert told == options - {"--json", "--output", "--quiet"}  # which every command has
