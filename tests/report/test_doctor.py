import importlib.machinery
import importlib.util
import subprocess
import sys
from importlib import metadata

import pytest

from exatwin.cli import run
from exatwin.report.doctor import examine


def test_a_missing_file_is_found(monkeypatch, capsys):
    """An installation without its calibrations is not whole, and the doctor survives that."""
    monkeypatch.setattr("exatwin.sim.calibration.bundled_names", lambda *_: [])
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "none; the installation is not complete" in out
    assert "WRONG" in out


def test_a_broken_file_is_named(monkeypatch):
    monkeypatch.setattr("exatwin.scenarios.scenario.load_machine", lambda name: 1 / 0)
    broken = [check for check in examine() if not check.ok]
    assert {check.name for check in broken} == {"bundled scenarios", "a prediction"}
    assert "frontier-1t: division by zero" in broken[0].detail


def test_an_old_package_is_named(monkeypatch):
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.9" if name == "click" else version(name))
    (check,) = [check for check in examine() if not check.ok]
    assert (check.name, check.detail) == ("click", "0.9; exatwin needs click>=8.1")


def torch_found(monkeypatch, tmp_path, version, build, devices=()):
    """The doctor's word on a torch that says this of itself, on a host with these devices."""
    folder, device_folder, find, found = (
        tmp_path / "torch",
        tmp_path / "dev",
        importlib.util.find_spec,
        metadata.version,
    )
    folder.mkdir()
    (folder / "version.py").write_text(build)
    for device in devices:
        (device_folder / device).parent.mkdir(parents=True, exist_ok=True)
        (device_folder / device).touch()
    spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr("exatwin.report.doctor.DEVICES", device_folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: spec if name == "torch" else find(name, *more))
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "torch" else found(name))
    (check,) = [check for check in examine() if check.name == "torch"]
    assert check.ok  # an extra: only the real run needs it
    return check.detail


CPU = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA = "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
ROCM = "cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\n"


@pytest.mark.parametrize(
    ("version", "build", "devices", "said"),
    [
        (
            "2.13.0+cpu",
            CPU,
            ["nvidia0"],
            "2.13.0+cpu, for exatwin train: gloo on the cores of this host; this build has",
        ),
        ("2.13.0", CUDA, ["nvidia0", "nvidia1", "nvidiactl"], "nccl (CUDA 12.8) on 2 GPUs, gloo on the cores"),
        ("2.13.0", CUDA, [], "gloo on the cores; nccl (CUDA 12.8) has no GPU here"),
        ("2.13.0+rocm6.4", ROCM, ["dri/renderD128"], "rccl (ROCm 6.4.43482) on 1 GPU, gloo"),
        ("1.9.0", CPU, [], "; exatwin train needs 2."),
        ("2.13.0", "nothing", [], "gloo on the cores of this host"),
    ],
)
def test_torch_is_found_with_what_its_ranks_talk_over(monkeypatch, tmp_path, version, build, devices, said):
    assert said in torch_found(monkeypatch, tmp_path, version, build, devices)


def test_without_torch_an_installation_is_whole_but_does_not_train(monkeypatch, capsys):
    def version(name, found=metadata.version):
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    assert run(["doctor"]) == 0
    assert "not installed: exatwin train needs it" in " ".join(capsys.readouterr().out.split())


def test_a_torch_that_is_half_there_is_told(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    monkeypatch.setattr(
        metadata, "version", lambda name, found=metadata.version: "2.13" if name == "torch" else found(name)
    )
    (check,) = [check for check in examine() if check.name == "torch"]
    assert check.ok
    assert "cannot be imported" in check.detail


def test_the_doctor_imports_no_torch():
    """It takes seconds, and the doctor is asked when something is wrong."""
    program = "import sys; from exatwin.report.doctor import examine; examine(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
