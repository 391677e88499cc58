"""A matcher is the state of an answer in its grammar, and says which tokens may come next.

Making one takes milliseconds, seconds for the largest grammars and a second more for a process's first (the tokenizer
has to be read). So `Matchers` makes them in its own thread: a request waits for its grammar, others do not.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import RequestError, RequestFailed
from engine.core.grammar import JSON_WHITESPACE, NAMED_SCHEMAS, SCHEMA_VALUES, Grammar
from engine.core.tree import TokenTree

_KEPT = 32  # grammars that are kept
_ANY_OBJECT = '{"type": "object"}'
_FORMATS = (
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "uri-template", "iri", "iri-reference", "uuid", "json-pointer", "relative-json-pointer", "regex",
)  # fmt: skip
"""The formats that JSON Schema defines. Those that the library knows are followed; all others have no effect."""
_ALWAYS_TRUE: dict[str, tuple[Any, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}),
    "uniqueItems": (False,),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
"""Keywords that the library may not know, with the values with which they have no effect."""
_NEEDS = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
"""Keywords that have no effect unless one of these is beside them."""
_REFUSALS = {
    "oneOf constraints are not supported": "oneOf is supported where its options exclude each other; use anyOf",
}
"""What a client can do, for errors in which the library names what only its caller can do."""
_STYLES = ((", ", ": "), (",", ":"))
"""The separators assumed when guessing JSON: with them nearly everything but the values follows from the schema."""
_FORESEEN = 16  # tokens


@functools.lru_cache(maxsize=_KEPT)
def check(grammar: Grammar) -> None:
    """Raise RequestError, with the library's reason, if there is no matcher for `grammar`."""
    if reason := refusal_of(grammar):
        raise _refused(grammar, reason)


def refusal_of(grammar: Grammar) -> str:
    """Return the library's reason for having no matcher for `grammar`, "" if it has one. Raises RequestError for text
    that cannot be converted.
    """
    return str(_library().LLMatcher.validate_grammar(_source(grammar), limits=_limits()))


class Matchers:
    """Makes the matchers of one model. tokenizer: loads its tokenizer, when it is first needed."""

    def __init__(self, tokenizer: Callable[[], Any], vocab_size: int, eos_tokens: Iterable[int]):
        self._load, self._vocab_size = tokenizer, vocab_size
        self._eos = sorted(token for token in eos_tokens if token < vocab_size)
        self._thread: ThreadPoolExecutor | None = None
        self._made: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._tokenizer: Any = None

    def begin(self, grammar: Grammar, answer: Sequence[int]) -> Future[Matcher]:
        """Start making a matcher that has consumed `answer`."""
        self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
        return self._thread.submit(self._make, grammar, list(answer))

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, grammar: Grammar, answer: list[int]) -> Matcher:
        if grammar not in self._made:
            state = self._state(_source(grammar))
            if state.is_error():
                raise _refused(grammar, state.get_error())
            guides = [self._state(source) for source in _guides(grammar)]
            guides = [guide for guide in guides if not guide.is_error()]
            made = Matcher(state, guides, self._vocab_size, self._tokenizer.vocab_size)
            if not (made.complete or np.delete(made.allowed(), self._eos).any()):
                raise _refused(grammar, "fits no text that the model's tokens can spell")
            self._made[grammar] = made
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(grammar)
        matcher = self._made[grammar].copy()
        for token in answer:
            matcher.accept(token)
        return matcher

    def _state(self, source: str) -> Any:
        if self._tokenizer is None:
            self._tokenizer = _tokens(self._load(), self._vocab_size, self._eos)
        return _library().LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())


class Matcher:
    """One answer's matcher. End-of-sequence tokens are the sampler's: they are allowed where the grammar is `complete`.

    state: the library's. guides: states of stricter grammars, used to guess, each until the answer departs from it.
    vocab_size: of the model; spelled: the tokens that the library knows, which may be more.
    """

    def __init__(self, state: Any, guides: list[Any], vocab_size: int, spelled: int):
        self._state, self._guides, self._vocab_size, self._spelled = state, guides, vocab_size, spelled
        self._bits = np.zeros((spelled + 31) // 32, np.uint32)
        self._failure: RequestFailed | None = None

    def copy(self) -> Matcher:
        """Return a copy in the same state."""
        guides = [guide.deep_copy() for guide in self._guides]
        return Matcher(self._state.deep_copy(), guides, self._vocab_size, self._spelled)

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._state.is_accepting())

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return bool(self._state.is_stopped()) and not self._state.is_error()

    @property
    def trouble(self) -> str:
        """Why the library could not continue, "" if it can."""
        return _first_line(self._state.get_error())

    def allows(self, token: int) -> bool:
        """Return whether `token`, which does not end the answer, may come next."""
        return bool(self._state.validate_tokens([token]) == 1)

    def allowed(self) -> NDArray[np.bool_]:
        """Return [vocab]: the tokens that may come next."""
        if self._failure is not None:
            raise self._failure
        if self.ended or self.trouble:
            return np.zeros(self._vocab_size, np.bool_)
        self._state.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        return bits.view(np.bool_)

    def accept(self, token: int) -> None:
        """Advance by the drawn `token`. Raises RequestFailed if the library gives up on the text; `allowed` then raises
        the same.
        """
        if not self._state.consume_token(token):
            reason = self.trouble or "the answer has left it"
            self._failure = RequestFailed(f"the grammar could not be followed: {reason}")
            raise self._failure
        self._guides = [guide for guide in self._guides if guide.consume_token(token)]

    def foreseen(self) -> list[int]:
        """Return tokens that most probably come next, because the grammar allows little else: a guess, for a draft."""
        for state in (*self._guides, self._state):
            known = itertools.takewhile(lambda token: token < self._vocab_size, state.compute_ff_tokens()[:_FORESEEN])
            if tokens := list(known):
                return list(tokens[: self._state.validate_tokens(tokens)])
        return []

    def admitted(self, tree: TokenTree) -> NDArray[np.bool_]:
        """Return [nodes]: whether the grammar allows each node of a draft; the root always is."""
        admitted = np.zeros(len(tree), np.bool_)
        admitted[0] = True
        for leaf in np.setdiff1d(np.arange(1, len(tree)), tree.parents).tolist():
            path = tree.path(leaf)[1:]
            count = self._state.validate_tokens(tree.tokens[path].tolist())
            admitted[path[:count]] = True
        return admitted


def _source(grammar: Grammar) -> str:
    """Return the grammar in the library's own form. Raises RequestError for text that cannot be converted."""
    library = _library()
    if grammar.regex is not None:
        return str(library.LLMatcher.grammar_from_regex(grammar.regex))
    try:
        if grammar.grammar is not None:
            return str(library.grammar_from("grammar", grammar.grammar))
        return str(library.LLMatcher.grammar_from_json_schema(_schema(grammar), JSON_WHITESPACE))
    except Exception as error:  # the GBNF converter may raise anything
        raise _refused(grammar, str(error) or type(error).__name__) from None


def _guides(grammar: Grammar) -> list[str]:
    """Return grammars of JSON in the usual one-line styles."""
    if grammar.regex is not None or grammar.grammar is not None:
        return []
    return [
        str(
            _library().LLMatcher.grammar_from_json_schema(
                _schema(grammar), {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
            )
        )
        for item, key in _STYLES
    ]


def _schema(grammar: Grammar) -> str:
    return _ANY_OBJECT if grammar.json_schema is None else without_annotations(str(grammar.json_schema))


@functools.lru_cache(maxsize=_KEPT)
def without_annotations(schema: str) -> str:
    """Return the schema without what the library would refuse although it has no effect: `format`s that it does not
    know, which are annotations to JSON Schema, and keywords that are always true.
    """
    try:
        whole = json.loads(schema)
        return json.dumps(whole) if _drop_annotations(whole) else schema
    except RecursionError:  # the library refuses it
        return schema


def _drop_annotations(schema: Any) -> bool:
    """Drop from the schema itself what has no effect, and return whether there was any."""
    waiting, dropped = [(schema, False)], False
    while waiting:
        value, named = waiting.pop()
        if isinstance(value, list):
            waiting += ((item, False) for item in value)
        elif isinstance(value, dict):
            for key in [key for key in value if not named and _says_nothing(key, value)]:
                del value[key]
                dropped = True
            names = () if named else NAMED_SCHEMAS
            waiting += ((item, key in names) for key, item in value.items() if named or key not in SCHEMA_VALUES)
    return dropped


def _says_nothing(key: str, schema: dict[str, Any]) -> bool:
    value = schema[key]
    if key == "format":
        return isinstance(value, str) and value not in _known_formats()
    if key in _NEEDS:
        return not any(other in schema for other in _NEEDS[key])
    return any(type(value) is type(one) and value == one for one in _ALWAYS_TRUE.get(key, ()))


@functools.cache
def _known_formats() -> frozenset[str]:
    library = _library().LLMatcher

    def knows(name: str) -> bool:
        source = library.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        return not library.validate_grammar(source)

    return frozenset(filter(knows, _FORMATS))


def _tokens(tokenizer: Any, vocab_size: int, eos_tokens: list[int]) -> Any:
    """Return the library's view of a tokenizer, which may spell more tokens than the model has."""
    made, size = _library().LLTokenizer, max(vocab_size, len(tokenizer))
    try:
        content = tokenizer.backend_tokenizer.to_str()
        return made(content, n_vocab=size, eos_token=eos_tokens or tokenizer.eos_token_id)
    except Exception as error:
        raise RequestError(f"grammar: this model's tokenizer does not work with grammars: {error}") from None


def _refused(grammar: Grammar, reason: str) -> RequestError:
    field = next(name for name in grammar.__struct_fields__ if getattr(grammar, name))
    first, *others = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    why = next((line for line in others if line.startswith("error:")), "")  # the error follows a drawing of the place
    ours = next((told for theirs, told in _REFUSALS.items() if theirs in first), None)
    return RequestError(f"grammar.{field}: {ours or f'{first[:300]} {why}'.rstrip()}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else ""


def _limits() -> Any:
    """Return the library's limits. A lexer state takes 1 to 2 kB, and the library's own limit is five times as many.
    Errors go to callers and logs, so they must not quote answers.
    """
    return _library().LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError('grammar: needs llguidance; run: pip install "talon-decoding[grammar]"') from None
    return llguidance
