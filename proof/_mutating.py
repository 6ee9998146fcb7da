"""Small wrong changes to a source: what a careless hand might have written instead.

Pure: takes text, gives the places that can be changed and how. Left alone is what no behaviour
hangs on: annotations, decorators, imports, docstrings, the words of errors and of the log, and how
a value shows itself.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_COMPARED: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_CALCULATED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_EXCHANGED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NOT_SWAPPED: Final = {"isinstance", "getattr", "min", "max", "samestat"}
_SILENT_METHODS: Final = {"__repr__", "__str__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of the bytes from ``start`` to ``end``. ``where`` is the function, ``was`` and
    ``becomes`` the text before and after; with ``nth`` of the same in that function these name it,
    whatever comes before. ``statement`` is the first and last line of what it is a part of."""

    where: str
    line: int
    statement: tuple[int, int]
    start: int
    end: int
    was: str
    becomes: str
    nth: int = 0

    @property
    def at_import(self) -> bool:
        """Whether it is run when the module is loaded, rather than by a call."""
        return not self.where

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.becomes.encode() + source[self.end :]


def mutants(source: bytes) -> list[Mutant]:
    """All changes of one source, each of which still compiles, always in the same order."""
    found: list[Mutant] = []
    counted: dict[tuple[str, str, str], int] = {}
    walk = _Walk(source)
    walk.visit(ast.parse(source))
    for where, node, becomes, statement in walk.found:
        start, end = walk.span(node)
        was = source[start:end].decode()
        nth = counted.setdefault((where, was, becomes), 0)
        counted[where, was, becomes] += 1
        found.append(
            Mutant(
                where=where,
                line=node.lineno,
                statement=statement,
                start=start,
                end=end,
                was=was,
                becomes=becomes,
                nth=nth,
            )
        )
    return found


_Placed = ast.expr | ast.stmt


class _Walk(ast.NodeVisitor):
    """Finds what can be changed, and into what."""

    def __init__(self, source: bytes) -> None:
        self.found: list[tuple[str, _Placed, str, tuple[int, int]]] = []
        self._scope: list[str] = []
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._in_call = False
        self._statement = (1, 1)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement = _lines(node)
        super().visit(node)

    def span(self, node: _Placed) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, node: _Placed, becomes: ast.AST | str) -> None:
        text = becomes if isinstance(becomes, str) else f"({ast.unparse(becomes)})"
        where = ".".join(self._scope) if self._in_call else ""
        self.found.append((where, node, text, self._statement))

    # What is left alone.

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Subscript) for target in node.targets) and self._in_call:
            self._add(node, "pass")
        if not _is_naming_types(node):
            self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        for inner in node.body:
            self.visit(inner)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _SILENT_METHODS:
            return
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        outer, self._in_call = self._in_call, True
        self._scope.append(node.name)
        for inner in node.body:
            self.visit(inner)
        self._scope.pop()
        self._in_call = outer

    # What is changed.

    def visit_Raise(self, node: ast.Raise) -> None:
        """The error's words are left alone, and so is whether it names a cause."""
        self._add(node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _is_logging(node.value):
            return
        if self._in_call and not isinstance(node.value, ast.Yield | ast.YieldFrom):
            self._add(node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "continue")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add(node, "pass")
            return
        if not (isinstance(node.value, ast.Constant) and not node.value.value):
            self._add(node, "return None")
        if not _is_error(node.value):
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        other = _CALCULATED.get(type(node.op))
        if other is not None:
            self._add(node, ast.unparse(ast.AugAssign(node.target, other(), node.value)))
        self.visit(node.value)

    def _visit_condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.BinOp):
            self._add(test, ast.UnaryOp(ast.Not(), test))

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._visit_condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._visit_condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if isinstance(node.body, ast.JoinedStr) or isinstance(node.orelse, ast.JoinedStr):
            return
        self._visit_condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._add(condition, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, op in enumerate(node.ops):
            for other in _COMPARED[type(op)]:
                ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                self._add(node, ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, ast.BoolOp(other, node.values))
        for place in range(len(node.values)):
            rest = [*node.values[:place], *node.values[place + 1 :]]
            self._add(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._add(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.BitOr) and _is_type(node.left) and _is_type(node.right):
            return
        if not any(_is_text(side) for side in (node.left, node.right)):
            self._add(node, ast.BinOp(node.left, _CALCULATED[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, repr(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, repr(node.value + 1))
            self._add(node, f"({node.value - 1!r})")

    def visit_Slice(self, node: ast.Slice) -> None:
        for side in (node.lower, node.upper):
            if side is not None:
                self._add(side, "")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not _is_type(node.value):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_logging(node) or _is_error(node) or _name_of(node.func) in {"cast", "TypeVar"}:
            return
        if isinstance(node.func, ast.Name) and node.func.id in _EXCHANGED:
            self._add(node.func, _EXCHANGED[node.func.id])
        places = [place for place, arg in enumerate(node.args) if not isinstance(arg, ast.Starred)]
        if len(places) > 1 and _name_of(node.func) not in _NOT_SWAPPED:
            first, second, *_ = node.args
            swapped = [second, first, *node.args[2:]]
            self._add(node, ast.Call(node.func, swapped, node.keywords))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: that nobody got the lengths wrong shows nowhere
            self.visit(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        for inner in _children(node):
            self.visit(inner)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield each


def _lines(node: ast.stmt) -> tuple[int, int]:
    """The lines of a statement, of one with a body those before it."""
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno
    return node.lineno, max(node.lineno, last or 0)


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_logging(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and _name_of(node.func.value) == "_log"
    )


def _is_error(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func).endswith(("Error", "Warning"))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_type(node: ast.expr) -> bool:
    """Whether it reads like a type: ``int``, ``Sequence``, ``int | str``."""
    if isinstance(node, ast.BinOp):
        return _is_type(node.left) and _is_type(node.right)
    name = _name_of(node)
    builtin = {"int", "str", "bytes", "float", "bool", "list", "dict", "set", "tuple", "type"}
    return name in {*builtin, "bytearray", "memoryview", "complex"} or (
        name.strip("_")[:1].isupper() and not name.isupper()
    )


def _is_naming_types(node: ast.Assign) -> bool:
    """Whether it gives types a name, as ``Rule = _Last | _Best`` does, or lists public names."""
    return all(isinstance(target, ast.Name) for target in node.targets) and (
        _is_type(node.value)
        or (isinstance(node.value, ast.Subscript) and _is_type(node.value.value))
        or any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    )
