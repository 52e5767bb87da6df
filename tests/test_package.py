"""The package as a user gets it: built, installed into an environment of its own, and used outside the checkout.

That environment has what the tests run on beneath it, so that nothing is downloaded; `make test-oldest` installs the wheel
with all that it needs into an empty one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIGS = {"single", "ddp", "fsdp2", "fsdp2_offload", "multi_node"}

pytestmark = pytest.mark.slow


def run(*command: str, folder: Path) -> str:
    """Runs a command elsewhere than in the checkout, without what finds the package there."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), folder=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; the dependencies that it asks for must be beneath."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", with_pip=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "beneath.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files, as of this checkout, play no part
    (wheel,) = built.glob("*.whl")
    run(str(folder / "venv/bin/python"), "-m", "pip", "uninstall", "--yes", "setuptools", folder=folder)  # older than beneath
    run(str(folder / "venv/bin/python"), "-m", "pip", "install", "--no-index", str(wheel), folder=folder)
    return folder


def test_what_is_in_the_wheel_and_in_the_sdist(built: Path) -> None:
    """Code, types and configurations; no tests or examples in the wheel."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"trl_opd/accelerate_configs/{name}.yaml" for name in CONFIGS} | {"trl_opd/py.typed"} <= names
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trl_opd").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}
    assert {name.split("/")[0] for name in names if not name.startswith("trl_opd-")} == {"trl_opd"}
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "setup.cfg", "pyproject.toml"} | sources <= packed


def test_the_program_runs_outside_the_checkout(installed: Path) -> None:
    program = str(installed / "venv/bin/trl-opd")
    assert run(program, "--help", folder=installed).startswith("usage: trl-opd <command>")
    assert run(program, "--version", folder=installed) == "trl-opd 0.1.0\n"
    assert "--teacher_model_name_or_path" in run(program, "train", "--help", folder=installed)
    code = "from trl_opd import OnPolicyDistillationTrainer, launcher; print(launcher.CONFIGS / 'ddp.yaml')"
    found = Path(run(str(installed / "venv/bin/python"), "-c", code, folder=installed).strip())
    assert found.is_relative_to(installed) and found.is_file()


def test_its_dependencies_are_there(installed: Path) -> None:
    """What the checkout's own environment lacks of others' is not our concern here."""
    python = str(installed / "venv/bin/python")
    done = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, cwd=installed, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("trl-opd ")] == []
