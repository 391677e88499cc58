"""What a wheel holds, and that the command works from it alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.commit import commit_of

ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling")

BUILD = "import zlib; zlib.Z_DEFAULT_COMPRESSION = 0; from hatchling.cli import hatchling; hatchling()"
"""Hatchling's command, without compression: that of the weights would take half a minute, and nobody reads them."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install` lays into site-packages."""
    out, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site-packages")
    subprocess.run(
        [sys.executable, "-c", BUILD, "build", "-t", "wheel", "-d", str(out)], cwd=ROOT, check=True, timeout=300
    )
    (wheel,) = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(installed: Path, *arguments: str) -> str:
    """`python ARGUMENTS` from another folder, with the wheel before everything else."""
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=installed.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_takes_no_names_but_those_of_its_packages(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"engine", "drafters", "retrieval_index"}
    assert all((installed / name / "py.typed").is_file() for name in names)


def test_the_command_finds_its_configurations_models_and_benchmarks_in_the_wheel(installed: Path) -> None:
    told = run(installed, "-m", "engine", "--version")
    (about,) = installed.glob("*.dist-info")
    version = about.name.removeprefix("talon_decoding-").removesuffix(".dist-info")
    assert told == f"talon {version}, built from commit {commit_of(ROOT)}\n"
    assert "--concurrency" in run(installed, "-m", "engine", "bench", "--help")
    found = run(
        installed,
        "-c",
        "from engine.config import DEMO, load; import engine; print(engine.__file__); print(DEMO.is_file());"
        "print(load(DEMO.with_name('smollm2.yaml')).drafter.path.format(method='block'))",
    ).split()
    assert found[0].startswith(str(installed)) and found[1] == "True"
    assert (Path(found[2]) / "model.safetensors").is_file() and found[2].startswith(str(installed))


def test_the_heads_that_hybrid_takes_are_in_the_wheel_and_an_error_says_where_others_are(
    installed: Path,
) -> None:
    models = installed / "engine" / "data" / "models"
    heads = {file.parent.relative_to(models).as_posix() for file in models.rglob("*.safetensors")}
    assert heads == {"smollm2-135m/block", "qwen2.5-coder-1.5b-instruct/block"}
    asked = (
        "from drafters.requirements import check; from engine.config import DEMO, load;"
        "from engine.core.errors import ModelError\n"
        "for method in ('hybrid', 'eagle3'):\n"
        "    try: check(load(DEMO.with_name('smollm2.yaml'), {'method': method})); print(method)\n"
        "    except ModelError as error: print(error)"
    )
    fine, error = run(installed, "-c", asked).splitlines()
    assert fine == "hybrid" and error.startswith(f"drafter.path={models}/smollm2-135m/eagle3: holds no weights")
    assert "--set drafter.path=CLONE/models/smollm2-135m/eagle3, or" in error


def test_the_prompts_of_a_tuning_are_in_the_wheel_with_the_notices_that_their_licences_ask_for(installed: Path) -> None:
    folder = installed / "engine" / "data" / "configs" / "train"
    assert (folder / "prompts.jsonl.xz").is_file()
    notices = (folder / "NOTICES.txt").read_text("utf8")
    assert "The above copyright notice and this permission notice shall be included in all" in notices
    for owner in ("Teknium", "The Algorithms", "Exercism", "OpenAI"):
        assert owner in notices


def test_benchmarks_import_each_other_wherever_the_package_is() -> None:
    for file in (ROOT / "benchmarks").rglob("*.py"):
        assert "from benchmarks" not in file.read_text("utf8"), f"{file.name}: import with a dot, not with a name"
