"""Turns a Lark grammar into a regular expression, where its language is regular.

The input of a custom tool travels within JSON, where the grammar's library follows a regular expression and no grammar.
Grammars of patches and commands seldom refer to themselves, so most have an expression.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t\r]|//[^\n]*|\#[^\n]*|\n[ \t\r\n]*(?=\|))+)
    |(?P<line>\n[ \t\r\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<case>i?)
    |(?P<pattern>/(?![*/ ])(?:\\.|[^/\\\n])+/)(?P<flags>[imsx]*)
    |(?P<name>[!?]*_?[A-Za-z][A-Za-z0-9_]*)
    |(?P<number>\d+)
    |(?P<sign>->|\.\.|[%:|()\[\]{}?*+~,.])""",
    re.VERBOSE,
)
_COMMON = {
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Lark's own terminals."""
_LONGEST = 20_000  # characters of an expression: rules that are used twice are written twice
_DEEPEST = 50  # rules and groups within each other
Token = tuple[str, str]


class _NotRegularError(Exception):
    """The grammar has no expression, or one that is not worth its length."""


def pattern_of(grammar: str) -> str | None:
    """Return a regular expression of the texts that the grammar's `start` derives, None if there is none."""
    try:
        rules = dict(_rules(grammar))
        return _Expression(rules, rules["start"], ("start",)).whole(1)
    except (_NotRegularError, KeyError, IndexError):
        return None


def _rules(grammar: str) -> Iterator[tuple[str, list[Token]]]:
    """Yield each rule's name and the tokens that define it."""
    yield from ((name, [("regex", text)]) for name, text in _COMMON.items())
    for line in _lines(grammar):
        words = [text for _, text in line]
        if words[:3] == ["%", "import", "common"]:
            yield from _imported(words[3:])
        elif line[0][0] == "name" and ":" in words[:4]:
            at = words.index(":")
            if at > 1 and words[1] != ".":  # a template; what follows a dot is a priority
                raise _NotRegularError
            yield words[0].lstrip("!?"), line[at + 1 :]
        else:  # another directive, such as %ignore
            raise _NotRegularError


def _imported(words: list[str]) -> Iterator[tuple[str, list[Token]]]:
    if words[0] == "(":
        names = [(word, word) for word in words[1:-1] if word != ","]
    else:
        names = [(words[1], words[3] if words[2:3] == ["->"] else words[1])]
    yield from ((new, [("regex", _COMMON[name])]) for name, new in names)


def _lines(grammar: str) -> Iterator[list[Token]]:
    """Yield the tokens of each line; a line that begins with `|` belongs to the one before."""
    line: list[Token] = []
    for kind, text in _tokens(grammar):
        if kind != "line":
            line.append((kind, text))
        elif line:
            yield line
            line = []
    if line:
        yield line


def _tokens(grammar: str) -> Iterator[Token]:
    end = 0
    while end < len(grammar):
        if (found := _TOKEN.match(grammar, end)) is None:
            raise _NotRegularError
        end = found.end()
        if found["text"] is not None:
            yield "regex", _literal(found["text"], found["case"])
        elif found["pattern"] is not None:
            flags = f"{found['flags']}:" if found["flags"] else ":"
            yield "regex", f"(?{flags}{found['pattern'][1:-1]})"
        elif found["blank"] is None:
            yield str(found.lastgroup), found[0]


def _literal(text: str, case: str) -> str:
    try:
        plain = re.escape(ast.literal_eval(text))
    except (SyntaxError, ValueError):
        raise _NotRegularError from None
    return f"(?i:{plain})" if case else f"(?:{plain})"


class _Expression:
    """The expression of one definition. above: the names of the rules that it is part of."""

    def __init__(self, rules: dict[str, list[Token]], tokens: list[Token], above: tuple[str, ...]):
        self.rules, self.tokens, self.above = rules, tokens, above
        self.at = 0

    def whole(self, depth: int) -> str:
        """Return the expression of all tokens. depth: the rules and groups that it is within."""
        found = self._choice(depth)
        if self.at < len(self.tokens):
            raise _NotRegularError
        return found

    def _next(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def _take(self, *texts: str) -> bool:
        taken = self._next()[0] == "sign" and self._next()[1] in texts
        self.at += taken
        return taken

    def _choice(self, depth: int) -> str:
        """Read options between bars."""
        if depth > _DEEPEST:
            raise _NotRegularError
        ways = [self._sequence(depth)]
        while self._take("|"):
            ways.append(self._sequence(depth))
        found = ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
        if len(found) > _LONGEST:
            raise _NotRegularError
        return found

    def _sequence(self, depth: int) -> str:
        parts = []
        while self._next()[0] in ("regex", "name") or self._next()[1] in ("(", "["):
            parts.append(self._repeated(self._atom(depth)))
        if self._take("->"):  # the name of a branch
            self.at += 1
        return "".join(parts)

    def _atom(self, depth: int) -> str:
        kind, text = self._next()
        self.at += 1
        if kind == "regex":
            return text
        if kind == "name":
            if text in self.above:
                raise _NotRegularError
            return f"(?:{_Expression(self.rules, self.rules[text], (*self.above, text)).whole(depth + 1)})"
        inner = f"(?:{self._choice(depth + 1)})"
        if not self._take(")" if text == "(" else "]"):
            raise _NotRegularError
        return inner if text == "(" else f"{inner}?"

    def _repeated(self, atom: str) -> str:
        for sign in "?*+":
            if self._take(sign):
                return f"(?:{atom}){sign}"
        if self._take("~"):
            least = self._number()
            return f"(?:{atom}){{{least},{self._number() if self._take('..') else least}}}"
        if self._take("{"):
            least = self._number() if self._next()[0] == "number" else "0"
            most = (self._number() if self._next()[0] == "number" else "") if self._take(",") else least
            if not self._take("}"):
                raise _NotRegularError
            return f"(?:{atom}){{{least},{most}}}"
        return atom

    def _number(self) -> str:
        kind, text = self._next()
        if kind != "number":
            raise _NotRegularError
        self.at += 1
        return text
