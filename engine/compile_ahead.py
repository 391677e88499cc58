"""`python -m engine.compile_ahead` compiles what a verifier needs last, while the verifier compiles the rest.

numba compiles on one thread, so the first start after an installation would leave all cores but one idle. Both
processes leave what they compile in numba's cache.
"""

from __future__ import annotations

import subprocess
import sys

from drafters.registry import compile_kernels
from engine.config import Config
from engine.core.child_environment import child_environment, end_with_parent


def begin(config: Config) -> None:
    """Say that the start takes longer, and start the process. It ends when its work is done, or with this process."""
    print(
        "talon: compiling for this processor, once after each installation: half a minute, later starts do without",
        file=sys.stderr,
        flush=True,
    )
    command = [sys.executable, "-m", "engine.compile_ahead"]
    silent = subprocess.DEVNULL  # what cannot be compiled is reported where it is needed
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, env=child_environment(), text=True
    )
    assert process.stdin is not None
    process.stdin.write(config.model_dump_json() + "\n")
    process.stdin.flush()


def main() -> None:
    config = Config.model_validate_json(sys.stdin.readline())
    end_with_parent()
    import torch

    from engine.kernels.attention.attention import attention_kernels

    # of the type that most models are of: one that is not needed would take ten seconds from those that are
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    attention_kernels(dtype, config.verifier.kv_type == "q8_0")
    compile_kernels(config)


if __name__ == "__main__":
    main()
