"""What the pages show is what the commands print. ``make samples`` writes the true output into them."""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from exatwin.cli import run
from exatwin.scenarios.layout import Layout
from exatwin.scenarios.perturb import Background, Jitter, LinkFault, NicFault, Perturbations, SlowDevice
from exatwin.topology.placement_spec import PlacementSpec

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SAMPLE = re.compile(
    r"^(```console\n\$ (exatwin [^\n]*)\n)(.*?)(^```)$|^(<!-- \$ (exatwin [^\n]*) -->\n)(.*?)(^<!-- end -->)$",
    re.MULTILINE | re.DOTALL,
)


def printed(command: str) -> str:
    """All that a command prints on a terminal of 80 columns without colour, or the lines of it that a grep leaves."""
    command, _, search = command.partition(" | grep -E ")
    output = io.StringIO()
    before = os.environ.copy()
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            run(shlex.split(command)[1:])
    finally:
        os.environ.clear()
        os.environ.update(before)
    lines = output.getvalue().splitlines(keepends=True)
    return "".join(line for line in lines if not search or re.search(shlex.split(search)[0], line))


def samples(page: Path) -> list[tuple[str, str, str]]:
    """Page, command and shown output: of a console block, or of tables between comments."""
    return [
        (page.name, found[2] or found[6], found[3] or found[7] or "") for found in SAMPLE.finditer(page.read_text())
    ]


def refreshed(found: re.Match[str]) -> str:
    """A sample with what its command prints now."""
    head, command, _, end = found.groups()[:4] if found[2] else found.groups()[4:]
    return f"{head}{printed(command)}{end}"


SAMPLES = [sample for page in PAGES for sample in samples(page)]


@pytest.mark.parametrize(
    ("page", "command", "shown"), SAMPLES, ids=[f"{page}: {command}" for page, command, _ in SAMPLES]
)
def test_a_page_shows_what_is_printed(page, command, shown):
    assert shown == printed(command), f"{page} is out of date; run: make samples"


def test_the_readme_has_its_sample():
    assert "README.md" in [page for page, _, _ in SAMPLES]


def test_commands_in_pages_exist():
    """Every ``exatwin VERB`` that a page names is a verb."""
    from exatwin.cli import cli

    for page in PAGES:
        for verb in re.findall(r"^ *(?:\$ |\| `)?exatwin ([a-z]+)", page.read_text(), re.MULTILINE):
            assert verb in cli.commands, f"{page.name}: exatwin {verb}"


def test_every_field_of_placement_and_perturb_is_explained():
    page = (ROOT / "docs" / "guides" / "scenarios.md").read_text()
    for kind in (PlacementSpec, Perturbations, SlowDevice, NicFault, LinkFault, Background, Jitter):
        for field in kind.model_fields:
            assert re.search(rf"^\| `[^|]*\b{field}\b[^|]*` \|", page, re.MULTILINE), f"{kind.__name__}: {field}"


def test_every_field_of_a_layout_is_explained_with_an_example():
    page = (ROOT / "docs" / "guides" / "layouts.md").read_text()
    for field in Layout.model_fields:
        (row,) = re.findall(rf"^\| `{field}` \|.*", page, re.MULTILINE) or [""]
        example = yaml.safe_load(row.rsplit("`", 2)[1]) if row else {}
        assert Layout.model_validate(example).model_fields_set, field


if __name__ == "__main__":
    for page in PAGES:
        old = page.read_text()
        new = SAMPLE.sub(refreshed, old)
        if new != old:
            page.write_text(new)
            print(page.relative_to(ROOT))
