"""What `talon --version` says that Talon was built from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from engine.commit import FILE, commit_of

AS_SOMEBODY = ("-c", "user.name=a", "-c", "user.email=a@b")


def test_a_clone_tells_its_commit_and_whether_files_were_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    assert commit_of(tmp_path) is None, "there is no commit yet"
    (tmp_path / "file").write_text("before")
    git("add", "file")
    git(*AS_SOMEBODY, "commit", "--quiet", "--message", "one")
    git("tag", "a-name")
    commit = git("rev-parse", "HEAD")[:12]
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("after")
    assert commit_of(tmp_path) == f"{commit} with changes"
    (tmp_path / "inside").mkdir()
    assert commit_of(tmp_path / "inside") is None, "a folder in a clone of something else"


def test_a_distribution_tells_what_it_was_built_from_wherever_it_lies(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / FILE).write_text("0123456789ab\n")
    assert commit_of(tmp_path) == "0123456789ab"
