"""Divisors, and arithmetic in text: whole numbers and names with `+ - * /` and parentheses. Pure, no torch."""

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import isqrt

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def divisors(number: int) -> list[int]:
    """Return the whole numbers that divide ``number``, rising."""
    low = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


class Arithmetic:
    """An expression, with the usual precedence.

    Args:
        text: the expression, of at most some hundred characters: its depth is that of the recursion here.

    Attributes:
        names: the names in it.
        divides: true if it has a division.

    Raises:
        ValueError: when it has anything else.
    """

    def __init__(self, text: str) -> None:
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, MemoryError, RecursionError):  # CPython raises all three for deep nesting
            raise ValueError("is not an arithmetic expression") from None
        nodes = list(ast.walk(self._tree))
        if not all(map(_is_allowed, nodes)):
            raise ValueError("has more than whole numbers, names, `+ - * /` and parentheses")
        self.names = frozenset(node.id for node in nodes if isinstance(node, ast.Name))
        self.divides = any(isinstance(node, ast.Div) for node in nodes)

    def value(self, values: Mapping[str, int]) -> Fraction:
        """The exact value, for the values of the names.

        Raises:
            ZeroDivisionError: when it divides by zero.
        """
        return _value(self._tree, values)


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return isinstance(node, (ast.BinOp, ast.Name, ast.Load, ast.UnaryOp, ast.USub, *_OPERATORS))


def _value(node: ast.expr, values: Mapping[str, int]) -> Fraction:
    match node:
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.UnaryOp():
            return -_value(node.operand, values)
        case ast.Name():
            return Fraction(values[node.id])
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case _:
            raise ValueError(f"{type(node).__name__} cannot be part of an expression")
