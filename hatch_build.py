"""Writes the commit that a wheel or a source distribution is built from into it, for `talon --version`."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file, unless the clone itself is installed or its commit cannot be told."""
        root = Path(self.root)
        module = runpy.run_path(str(root / "engine" / "commit.py"))
        commit, name = module["commit_of"](root), module["FILE"]
        if version == "editable" or commit is None:
            return
        self._folder = tempfile.TemporaryDirectory()  # removed with this hook
        written = Path(self._folder.name) / name
        written.write_text(f"{commit}\n", "utf8")
        build_data["force_include"][str(written)] = f"engine/data/{name}" if self.target_name == "wheel" else name
