"""What ships, what starts, and whether every figure has its source."""

import csv
import doctest
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import exatwin

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("topology", "scenarios", "sim", "trainer", "twin", "report")
SKIPPED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)


def package_folders() -> list[Path]:
    """Folders that hold an ``__init__.py``, the root first."""
    inner = sorted(path.parent for room in ROOMS for path in (ROOT / room).rglob("__init__.py"))
    return [ROOT, *inner]


def test_every_package_folder_is_listed():
    names = {".".join(("exatwin", *folder.relative_to(ROOT).parts)) for folder in package_folders()}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names


def test_nothing_stray_stands_at_the_root():
    """Every ``.py`` at the root would be shipped."""
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "_version.py", "cli.py"}
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_no_module_takes_the_name_of_a_standard_one():
    names = {path.stem for path in ROOT.glob("*.py")} | set(ROOMS)
    assert not names & set(sys.stdlib_module_names)


def test_the_version_is_stated_once():
    assert exatwin.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {exatwin.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_every_requirement_is_locked():
    """A constraint for each requirement."""
    locked = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    project = PROJECT["project"]
    asked = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    names = {re.split(r"[<>=]", requirement)[0].lower() for requirement in asked}
    assert names <= locked


def shipped_files() -> set[str]:
    """What a wheel must hold: modules, and data by the patterns of ``package-data``."""
    files = {f"exatwin/{path.relative_to(ROOT)}" for folder in package_folders() for path in folder.glob("*.py")}
    for room in ROOMS:
        files |= {
            f"exatwin/{path.relative_to(ROOT)}"
            for suffix in ("yaml", "csv")
            for path in (ROOT / room).rglob(f"*.{suffix}")
        }
    return files | {"exatwin/py.typed"}


@pytest.mark.slow
def test_a_wheel_built_from_the_source_distribution_works_elsewhere(tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=SKIPPED)
    build = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"

    def built(hook: str, where: Path) -> Path:
        subprocess.run([sys.executable, "-c", build, hook, str(tmp_path)], cwd=where, check=True, capture_output=True)
        return next(tmp_path.glob("*.tar.gz" if hook == "build_sdist" else "*.whl"))

    shutil.unpack_archive(built("build_sdist", tree), tmp_path / "sdist", filter="data")
    unpacked = next((tmp_path / "sdist").iterdir())
    assert (unpacked / "tests" / "test_packaging.py").is_file()
    assert (unpacked / "Makefile").is_file()
    with zipfile.ZipFile(built("build_wheel", unpacked)) as wheel:
        held = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
        wheel.extractall(tmp_path / "site")
    assert held == shipped_files()

    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); import exatwin.cli as c; print(c.__file__); c.main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path / "site"), "doctor"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert done.returncode == 0, done.stdout + done.stderr


def modules() -> list[str]:
    """Every module of the package; the trainer's need torch, which is an extra."""
    names = [module.name for module in pkgutil.walk_packages(exatwin.__path__, "exatwin.")]
    return [name for name in names if not name.startswith("exatwin.trainer") and name != "exatwin.__main__"]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_are_true(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


def source_keys(node: object) -> Iterator[str]:
    """Every text under a key ``source`` of a YAML document."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "source" and value is not None:
                yield from value if isinstance(value, list) else [value]
            else:
                yield from source_keys(value)
    elif isinstance(node, list):
        for item in node:
            yield from source_keys(item)


def used_sources() -> dict[str, str]:
    """Source keys in the bundled data, each with a file that uses it."""
    used: dict[str, str] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.yaml")):
            used |= dict.fromkeys(source_keys(yaml.safe_load(path.read_text())), path.name)
        for path in sorted((ROOT / room).rglob("*.csv")):
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    used |= {
                        key.strip(): path.name for key in re.split(r"[;,]", row.get("source") or "") if key.strip()
                    }
    return used


def test_every_source_is_explained():
    explained = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "sources.md").read_text(), re.MULTILINE))
    used = used_sources()
    assert {key: file for key, file in used.items() if key not in explained} == {}
    assert explained - set(used) - {"assumed"} == set(), "explained but not used"


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
