"""The style of pictures. Okabe and Ito's colours, which people with any kind of colour vision can tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

OURS, BASELINES, PEERS = "#0072B2", "#999999", "#E69F00"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
LINES, MARKERS = ("-", "--", "-.", ":"), "os^Dv"
HATCHES = ("", "//", "..", "xx", "\\\\")
"""Used besides colours, so that bars differ in black and white too."""
_OURS = ("talon", "hybrid", "+")  # prefixes of our own methods' names


def line_style(place: int) -> dict[str, Any]:
    """The style of the line at that place: its own colour, dashes and markers."""
    looks = {"color": COLOURS[place % 7], "linestyle": LINES[place % 4], "marker": MARKERS[place % 5]}
    return looks | {"markersize": 4}


def colour_of(method: str) -> str:
    return OURS if method.startswith(_OURS) else PEERS if method.startswith("hf") else BASELINES


def save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
