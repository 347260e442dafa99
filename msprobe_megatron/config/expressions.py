"""The expressions of custom alert rules: comparisons and arithmetic on the columns of a row, parsed and never `eval`ed.

    norm > 1e3 and zeros < 0.5
    kind == "grad_reduced" and (absmax / norm > 0.9 or not n_nan == 0)

Parsed when the probe file is read, so that an error is reported before the job starts; evaluated by the alerts of the
monitor on whole columns (any objects with arithmetic, such as NumPy arrays).
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

NUMBERS: tuple[str, ...] = (
    "norm",
    "mean",
    "std",
    "min",
    "max",
    "absmax",
    "sum",
    "sumsq",
    "zeros",
    "numel",
    "n_nan",
    "n_posinf",
    "n_neginf",
    "n_inf",
    "n_zero",
    "step",
    "microbatch",
    "layer",
    "seq",
)
TEXTS: tuple[str, ...] = ("kind", "name", "io", "path", "phase", "op", "dtype")

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign><=|>=|==|!=|[-+*/<>()]))"
)
_LONGEST = 1000
_DEEPEST = 40
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_ADD: dict[str, Callable[[Any, Any], Any]] = {"+": operator.add, "-": operator.sub}
_MULTIPLY: dict[str, Callable[[Any, Any], Any]] = {"*": operator.mul, "/": operator.truediv}
_LOGIC: dict[str, Callable[[Any, Any], Any]] = {"and": operator.and_, "or": operator.or_}
Columns = Mapping[str, Any]


class ExpressionError(ValueError):
    """An expression that cannot be parsed; the message says where, and what is accepted."""


class _Value(NamedTuple):
    """A subexpression: its type (`number`, `text` or `truth`) and its evaluation."""

    kind: str
    of: Callable[[Columns], Any]


class Expression(NamedTuple):
    """A condition on columns."""

    text: str
    holds: Callable[[Columns], Any]
    columns: tuple[str, ...]


def parse_expression(text: str) -> Expression:
    """Parse a condition; raises ``ExpressionError``.

    Example::

        >>> parse_expression("n_nan > 0 or absmax > 1e4").columns
        ('n_nan', 'absmax')
    """
    parser = _Parser(text)
    value = parser.either()
    if parser.ahead:
        raise ExpressionError(f"cannot go on at {parser.ahead!r}; accepted: and, or, a comparison, or the end")
    if value.kind != "truth":
        raise ExpressionError(f"is a {value.kind} and not a condition; accepted: a comparison such as norm > 1e3")
    return Expression(text, value.of, tuple(parser.columns))


class _Parser:
    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise ExpressionError(f"has {len(text)} characters; accepted: at most {_LONGEST}")
        self._tokens = _tokens(text)
        self._at = self._depth = 0
        self.columns: dict[str, None] = {}

    @property
    def ahead(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self.ahead
        self._at += 1
        return token

    def either(self) -> _Value:
        """`or` binds least, then `and`, then `not`, then comparisons."""
        return self._logic("or", self._both)

    def _both(self) -> _Value:
        return self._logic("and", self._not)

    def _logic(self, word: str, part: Callable[[], _Value]) -> _Value:
        left = part()
        while self.ahead == word:
            self._next()
            left = _joined("truth", "truth", _LOGIC[word], left, part(), word)
        return left

    def _not(self) -> _Value:
        if self.ahead != "not":
            return self._comparison()
        self._next()
        inner = self._nested(self._not)
        _expect("truth", inner, "not")
        return _Value("truth", lambda columns: inner.of(columns) ^ True)

    def _comparison(self) -> _Value:
        left = self._sum()
        sign = self.ahead
        if sign not in _COMPARE:
            return left
        self._next()
        right = self._sum()
        if "text" in (left.kind, right.kind):
            if sign not in ("==", "!="):
                raise ExpressionError(f"{sign} between texts; accepted: == and !=")
            return _joined("text", "truth", _COMPARE[sign], left, right, sign)
        return _joined("number", "truth", _COMPARE[sign], left, right, sign)

    def _sum(self) -> _Value:
        return self._chain(_ADD, lambda: self._chain(_MULTIPLY, self._factor))

    def _chain(self, signs: Mapping[str, Callable[[Any, Any], Any]], part: Callable[[], _Value]) -> _Value:
        left = part()
        while (sign := self.ahead) in signs:
            self._next()
            left = _joined("number", "number", signs[sign], left, part(), sign)
        return left

    def _factor(self) -> _Value:
        word = self._next()
        if word == "-":
            inner = self._nested(self._factor)
            _expect("number", inner, "-")
            return _Value("number", lambda columns: -inner.of(columns))
        if word == "(" or (word == "abs" and self.ahead == "("):
            if word == "abs":
                self._next()
            inner = self._nested(self.either)
            if self._next() != ")":
                raise ExpressionError("a bracket is not closed; accepted: )")
            if word == "(":
                return inner
            _expect("number", inner, "abs")
            return _Value("number", lambda columns: abs(inner.of(columns)))
        return self._leaf(word)

    def _leaf(self, token: str) -> _Value:
        if token[:1] in ("'", '"'):
            return _Value("text", lambda columns: token[1:-1])
        if token[:1].isdigit() or token[:1] == ".":
            number = float(token)
            return _Value("number", lambda columns: number)
        if token in NUMBERS or token in TEXTS:
            self.columns[token] = None
            return _Value("number" if token in NUMBERS else "text", lambda columns: columns[token])
        shown = repr(token) if token else "the end"
        raise ExpressionError(
            f"{shown} is no column; accepted: {', '.join((*NUMBERS, *TEXTS))}, numbers, texts in quotes"
        )

    def _nested(self, part: Callable[[], _Value]) -> _Value:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ExpressionError(f"is nested too deeply; accepted: at most {_DEEPEST} brackets, signs and nots")
        value = part()
        self._depth -= 1
        return value


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            rest = text[at:].strip()[:20]
            raise ExpressionError(f"cannot read {rest!r}; accepted: columns, numbers, + - * / < > == !=, and, or, not")
        found.append(match[0].strip())
        at = match.end()
    return found


def _expect(kind: str, value: _Value, sign: str) -> None:
    if value.kind != kind:
        raise ExpressionError(f"{sign} of a {value.kind}; accepted: a {kind}")


def _joined(kind: str, gives: str, work: Callable[[Any, Any], Any], left: _Value, right: _Value, sign: str) -> _Value:
    _expect(kind, left, sign)
    _expect(kind, right, sign)
    return _Value(gives, lambda columns: work(left.of(columns), right.of(columns)))
