"""The names that a drafter of your own imports: the protocol (`engine.core.drafter_protocol`), trees, the table of
methods.

See docs/add-a-drafter.md and examples/own_drafter.py.
"""

from engine.core.drafter_protocol import BetweenSteps, Drafter, Verdict
from engine.core.methods import METHODS, Method
from engine.core.outcomes import DraftQuery
from engine.core.tree import TokenTree

__all__ = ["METHODS", "BetweenSteps", "DraftQuery", "Drafter", "Method", "TokenTree", "Verdict"]
