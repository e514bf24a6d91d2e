"""The command ``exatwin``: parse, call one library function, print.

Everything heavy is imported inside the command that needs it, so that
``exatwin --help`` answers at once. Exit codes: 0 done; 1 failed; 2 bad input;
3 valid, but the answer is no; 4 outside a stated tolerance; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ._version import __version__
from .topology.errors import InputError, RunError, input_error, nearest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .report.terminal import Screen
    from .sim.predict import NetworkMode

DONE, FAILED, BAD_INPUT, ANSWER_IS_NO, OUTSIDE_TOLERANCE, INTERRUPTED = 0, 1, 2, 3, 4, 130

KINDS = ("machines", "topology", "models", "scenarios", "calibrations", "frameworks", "schedules", "published")
SCHEMAS = ("scenario", "machine", "model", "framework")

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


@dataclass
class Session:
    """What holds for one call of the program, whatever the command."""

    traceback: bool = False


def _is_number(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse nan, which no range refuses."""
    if math.isnan(value):
        raise click.BadParameter("nan is no number.", ctx, param)
    return value


class BundledName(click.ParamType):
    """A bundled name or a path; the shell completes the bundled ones."""

    name = "name|path"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Bundled names, and files after them."""
        from click.shell_completion import CompletionItem

        from .report.show import names

        kind = self.kind or ctx.params.get("kind") or KINDS[0]
        found = [CompletionItem(name) for name in names(kind) if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


class Word(click.ParamType):
    """One of a few words; an unknown one suggests the nearest."""

    name = "word"

    def __init__(self, choices: Callable[[], Sequence[str]], metavar: str) -> None:
        self.choices = choices
        self.name = metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word itself."""
        known = self.choices()
        if value in known:
            return str(value)
        raise click.BadParameter(f"{value!r} is not known{nearest(str(value), known)}", ctx, param)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """The words that begin so."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(word) for word in self.choices() if word.startswith(incomplete)]


def _fidelities() -> Sequence[str]:
    from .sim.predict import FIDELITIES

    return FIDELITIES


def _network_modes() -> Sequence[str]:
    from .sim.predict import NETWORK_MODES

    return NETWORK_MODES


def _validation_kinds() -> Sequence[str]:
    return ("time", "memory", "verdict", "message")


def _output_options(command: CommandT) -> CommandT:
    """``--json``, ``-o`` and ``-q``, as every command that gives an answer has them."""
    options = (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, the table on stderr."),
        click.option("-o", "--output", metavar="FILE", help="Write the JSON document to FILE; - is stdout."),
        click.option("-q", "--quiet", is_flag=True, help="Print no table."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EXATWIN", "max_content_width": 100},
)
@click.version_option(__version__, prog_name="exatwin", message="%(prog)s %(version)s")
@click.option(
    "--traceback",
    "show_traceback",
    is_flag=True,
    envvar="EXATWIN_TRACEBACK",
    help="Show where an internal error arose.",
)
@click.pass_context
def cli(context: click.Context, show_traceback: bool) -> None:
    """A digital twin of cluster training.

    Predicts step time, communication, memory and node-hours of a parallel
    layout before any are spent. Start with: exatwin simulate frontier-1t
    """
    context.ensure_object(Session).traceback = show_traceback
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command()
@click.argument("scenario", type=BundledName("scenarios"), metavar="NAME|PATH")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a field, such as layout.tp=4; may be repeated.",
)
@click.option(
    "--calibration",
    type=BundledName("calibrations"),
    metavar="NAME|PATH",
    help="Measured efficiencies to predict with.",
)
@click.option(
    "--fidelity",
    type=Word(_fidelities, "LEVEL"),
    default="des",
    show_default=True,
    help="screen, recurrence, des, des-exact or des-per-rank: quick to thorough; the last plays every rank by itself.",
)
@click.option(
    "--network",
    type=Word(_network_modes, "MODE"),
    default="shared",
    show_default=True,
    help="shared, or solo: every transfer as if it were alone, to see what contention costs.",
)
@_output_options
def simulate(
    scenario: str,
    overrides: tuple[str, ...],
    calibration: str | None,
    fidelity: str,
    network: NetworkMode,
    as_json: bool,
    output: str | None,
    quiet: bool,
) -> int:
    """Predict one training step of a scenario, its memory and its cost.

    NAME is a bundled scenario (exatwin show scenarios) or a path to a file.
    Exits with 3 where the layout does not fit in memory.
    """
    from .report.documents import check_destination

    check_destination(output)
    from .report.published import published_run
    from .report.tables import prediction_document, prediction_view
    from .scenarios.scenario import load_scenario
    from .sim.calibration import load_calibration
    from .sim.predict import predict

    question = load_scenario(scenario, overrides)
    prediction = predict(question, load_calibration(calibration) if calibration else None, fidelity, network)
    _answer(
        prediction_document(prediction, question),
        lambda screen: [prediction_view(prediction, question, published_run(question, prediction), screen)],
        as_json=as_json,
        output=output,
        quiet=quiet,
    )
    return ANSWER_IS_NO if prediction.memory.verdict == "does not fit" else DONE


@cli.command()
@click.argument("scenario", type=BundledName("scenarios"), metavar="NAME|PATH")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a field; may be repeated.")
@click.option("--steps", type=click.IntRange(1, 10**9), default=20, show_default=True, help="Steps of the whole run.")
@click.option("--data", metavar="FILE", help="Text or token file; left out: the scenario's, or Python's own source.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of weights and data.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, 10, min_open=True),
    callback=_is_number,
    default=3e-4,
    show_default=True,
    help="Adam's.",
)
@click.option("--checkpoint", metavar="FOLDER", help="Write checkpoints there; go on from the last one there.")
@click.option(
    "--checkpoint-every",
    type=click.IntRange(1, 10**9),
    default=100,
    show_default=True,
    help="Steps between them; there is one at the end too.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="Times that a run whose rank died begins again from its last checkpoint.",
)
@click.option("--tensorboard", metavar="FOLDER", help="Write TensorBoard's events there.")
@click.option("--profile", metavar="FILE", help="Profile the last three steps of rank 0, and write their trace.")
@click.option("--device", type=Word(lambda: ("auto", "cpu", "cuda"), "KIND"), default="auto", show_default=True)
@click.option("--force", is_flag=True, help="Run even if the predicted memory is more than there is.")
@_output_options
def train(
    scenario: str,
    overrides: tuple[str, ...],
    steps: int,
    data: str | None,
    seed: int,
    learning_rate: float,
    checkpoint: str | None,
    checkpoint_every: int,
    max_restarts: int,
    tensorboard: str | None,
    profile: str | None,
    device: str,
    force: bool,
    as_json: bool,
    output: str | None,
    quiet: bool,
) -> int:
    """Train a scenario with PyTorch on the devices at hand, and measure it.

    Takes the same file as simulate. Starts its ranks on this host, or joins those
    that torchrun or srun has started. Ctrl-C stops after the step, with a
    checkpoint where there is a folder for them; the exit code is then 130.
    """
    from .report.documents import check_destination

    check_destination(output)
    check_destination(profile)
    from .report.training import measurement_view, training_on
    from .scenarios.scenario import load_scenario
    from .trainer.options import TrainOptions
    from .twin.train import train as run_training

    question = load_scenario(scenario, overrides)
    options = TrainOptions(
        steps=steps,
        seed=seed,
        learning_rate=learning_rate,
        data=data,
        checkpoint=Path(checkpoint).expanduser() if checkpoint else None,
        checkpoint_every=checkpoint_every,
        max_restarts=max_restarts,
        tensorboard=Path(tensorboard).expanduser() if tensorboard else None,
        profile=Path(profile).expanduser() if profile else None,
        device=device,
    )
    with training_on(sys.stderr, quiet=quiet) as (tell, note):
        trained = run_training(question, options, tell, note, force=force)
    measured = trained.measurement
    if measured is not None:
        _answer(
            measured.document(__version__),
            lambda screen: [measurement_view(measured, trained.scenario, screen)],
            as_json=as_json,
            output=output,
            quiet=quiet,
        )
    return INTERRUPTED if trained.stopped else DONE


@cli.command()
@click.argument("kind", type=Word(lambda: KINDS, "KIND"), metavar="[" + "|".join(KINDS) + "]")
@click.argument("name", required=False, type=BundledName(""), metavar="[NAME|PATH]")
@_output_options
def show(kind: str, name: str | None, as_json: bool, output: str | None, quiet: bool) -> int:
    """List what is bundled, or show one of it in full.

    With topology, -o FILE draws the machine (.svg, .png, .pdf) or writes its
    graph (.graphml, .json, .edges); with a published run it writes its scenario.
    """
    from .report.documents import check_destination

    check_destination(output)
    from .report.show import show_kind, show_one

    shown = show_one(kind, name) if name else show_kind(kind)
    if shown.save and output and output != "-":
        shown.save(output)
        output = None
    _answer(shown.document, shown.view, as_json=as_json, output=output, quiet=quiet)
    return DONE


@cli.command()
@click.argument("kind", type=Word(lambda: SCHEMAS, "KIND"), metavar="[" + "|".join(SCHEMAS) + "]", default="scenario")
@click.option("-o", "--output", metavar="FILE", help="Write it to FILE; - is stdout.")
def schema(kind: str, output: str | None) -> int:
    """Print the JSON Schema of a file, for editors and checkers."""
    from .report.documents import check_destination, write_document
    from .report.show import json_schema

    check_destination(output)
    write_document(json_schema(kind), output or "-")
    return DONE


@cli.command()
@_output_options
@click.option("--source", metavar="NAME", help="Only rows of this series or source.")
@click.option("--device", metavar="NAME", help="Only rows of this kind of device, such as A100.")
@click.option("--kind", type=Word(_validation_kinds, "KIND"), help="Only time, memory, verdict or message.")
@click.option("--fast", is_flag=True, help="A few rows of each series.")
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N", help="Processes; left out: one for each core.")
@click.option("--markdown", is_flag=True, help="Print Markdown tables, as docs/accuracy.md holds them.")
@click.option("--state-bounds", metavar="FILE", help="Write the bounds that these errors keep, as YAML.")
@click.option("--network", is_flag=True, help="Published benchmarks of collectives and messages instead of whole runs.")
@click.option("--rows", is_flag=True, help="Every row, measured and predicted.")
def validate(
    as_json: bool,
    output: str | None,
    quiet: bool,
    source: str | None,
    device: str | None,
    kind: str | None,
    fast: bool,
    jobs: int | None,
    markdown: bool,
    state_bounds: str | None,
    network: bool,
    rows: bool,
) -> int:
    """Predict every published run and compare. Exits with 4 outside a stated tolerance.

    -o FILE draws the rows (.html, which needs nothing else, or .png), lists them (.csv), or writes the JSON document.
    """
    from .report.documents import check_destination, write_text
    from .report.scatter import saver

    check_destination(output)
    check_destination(state_bounds)
    save = saver(output) if output and output != "-" else None
    if network:
        if save is not None:
            raise input_error("benchmarks of the network are written as a .json document only", where=output or "")
        from .report.network import network_document, network_markdown, network_view
        from .twin.network_validation import validate_network

        benchmarks = validate_network()
        within, document = benchmarks.within, network_document(benchmarks)
        as_markdown, view = (
            partial(network_markdown, benchmarks, rows=rows),
            partial(network_view, benchmarks, rows=rows),
        )
    else:
        from .report.progress import progress_on
        from .report.validation import validation_markdown, validation_view
        from .twin.bounds import bounds_text
        from .twin.validate import validate as compare_all

        with progress_on(sys.stderr, "predicting published runs", quiet=quiet) as progress:
            runs = compare_all(source, device, kind, fast=fast, jobs=jobs, progress=progress)
        if save is not None:
            save(runs)
            output = None
        if state_bounds:
            write_text(bounds_text(runs.rows), state_bounds)
        within, document = runs.within, runs.document(__version__)
        as_markdown, view = partial(validation_markdown, runs, rows=rows), partial(validation_view, runs, rows=rows)
    if markdown:
        click.echo(as_markdown(), nl=False)
    _answer(document, view, as_json=as_json, output=output, quiet=quiet or markdown)
    return DONE if within else OUTSIDE_TOLERANCE


@cli.command()
@_output_options
def doctor(as_json: bool, output: str | None, quiet: bool) -> int:
    """Check this installation: versions, bundled files, a first prediction."""
    from .report.doctor import doctor_view, examine

    checks = examine()
    healthy = all(check.ok for check in checks)
    document = {"exatwin_version": __version__, "ok": healthy, "checks": [check.document() for check in checks]}
    _answer(document, lambda screen: [doctor_view(checks, screen)], as_json=as_json, output=output, quiet=quiet)
    return DONE if healthy else FAILED


@cli.command()
@click.argument("shell", type=Word(lambda: ("bash", "zsh", "fish"), "SHELL"), metavar="[bash|zsh|fish]")
def completion(shell: str) -> int:
    """Print the completion script of a shell.

    For bash: exatwin completion bash > ~/.exatwin-complete.bash, then source that
    file from ~/.bashrc.
    """
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    if completer is None:
        raise input_error(f"no completion for {shell}")
    click.echo(completer(cli, {}, "exatwin", "_EXATWIN_COMPLETE").source())
    return DONE


def _answer(
    document: dict[str, Any],
    view: Callable[[Screen], Sequence[RenderableType]],
    *,
    as_json: bool,
    output: str | None,
    quiet: bool,
) -> None:
    """The answer where it was asked for: a document to programs, a table to people."""
    from .report.documents import write_document
    from .report.terminal import open_console, print_parts, screen_of

    on_stdout = as_json or output == "-"
    if output and output != "-":
        write_document(document, output)
    if on_stdout:
        write_document(document, "-")
    if not quiet:
        console = open_console(sys.stderr if on_stdout else sys.stdout)
        print_parts(console, view(screen_of(console)))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; every failure is one message on stderr."""
    session = Session()
    try:
        code = cli.main(
            None if arguments is None else list(arguments), prog_name="exatwin", obj=session, standalone_mode=False
        )
        sys.stdout.flush()
        return int(code or DONE)
    except InputError as error:
        _say(f"error: {error}")
        return BAD_INPUT
    except click.UsageError as error:
        hint = f" ({error.ctx.command_path} -h helps)" if error.ctx else ""
        _say(f"error: {error.format_message()}{hint}")
        return BAD_INPUT
    except click.ClickException as error:
        _say(f"error: {error.format_message()}")
        return FAILED
    except RunError as error:
        if session.traceback:
            traceback.print_exc()
        _say(f"error: {error}")
        return FAILED
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _leave_stdout()
        return FAILED
    except OSError as error:
        # Files that users name are handled where they are read and written; what is left is a full disk behind stdout.
        if session.traceback:
            traceback.print_exc()
        _say(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        _leave_stdout()
        return FAILED
    except Exception as error:
        if session.traceback:
            traceback.print_exc()
        text = " ".join(str(error).split())
        _say(f"error: internal: {type(error).__name__}: {text}; exatwin --traceback ... shows where")
        return FAILED


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _leave_stdout() -> None:
    """Send what is still buffered nowhere, so that Python's exit stays quiet."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> NoReturn:
    """The console script."""
    sys.exit(run())
