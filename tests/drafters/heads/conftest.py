"""Makes Triton's interpreter as quick for heads as for the target's kernels."""

from __future__ import annotations

from tests.engine.model.cuda.conftest import _language_is_replaced_once as _language_is_replaced_once
