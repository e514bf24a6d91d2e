from importlib import metadata

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
