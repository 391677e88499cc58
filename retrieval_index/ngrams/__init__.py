"""Compiled kernels of the session index: counted n-grams in flat arrays, and trees drafted from them.

A store is one text (a request's own, its owner's finished answers, or public ones) with, for each of its contexts of 0
to 4 tokens, a short list of the tokens that followed it. A match serves longer contexts.

Kernels take arrays one by one and never slice them in a loop: each view costs an atomic reference count.
"""

from retrieval_index.ngrams.drafting import draft
from retrieval_index.ngrams.mixture import BUCKETS, COMPONENTS
from retrieval_index.ngrams.store import END, ORDERS, SEPARATOR, USED, Store, length, new_store, parts, store_for
from retrieval_index.ngrams.texts import append, copy_into, grown, remember, with_text

__all__ = [
    "BUCKETS",
    "COMPONENTS",
    "END",
    "ORDERS",
    "SEPARATOR",
    "USED",
    "Store",
    "append",
    "copy_into",
    "draft",
    "grown",
    "length",
    "new_store",
    "parts",
    "remember",
    "store_for",
    "with_text",
]
