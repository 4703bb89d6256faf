"""What an expression of a script is worth, without running the script.

Known are literals, names that are bound to one value, fields of dataclasses and argparse options with a default,
f-strings and plain arithmetic of these. Anything else is `Computed`, with the reason.
"""

import ast
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from portlab_port.settings import Computed

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_CASTS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "bool": bool, "list": list,
                                         "tuple": tuple, "max": max, "min": min}  # fmt: skip
_PARSERS = ("parse_args", "parse_known_args")
_DATACLASS_PARSERS = ("parse_args_into_dataclasses", "parse_args_and_config", "parse_dict", "parse_json_file")
_MOST_DIGITS = 1e12


class Script:
    """The bindings of a script."""

    def __init__(self, tree: ast.Module) -> None:
        """Collect what names, fields and options are bound to.

        Args:
            tree: the script.
        """
        self.tree = tree
        self._bound: dict[str, list[ast.expr | Computed]] = defaultdict(list)
        self._lines: dict[str, list[int]] = defaultdict(list)
        self._items: dict[str, list[tuple[str, ast.expr]]] = defaultdict(list)
        self._changed: dict[str, int] = {}
        self._fields: dict[str, dict[str, ast.expr | Computed]] = {}
        self._options: dict[str, ast.expr | Computed] = {}
        self._called: set[str] = set()
        self._active: set[str] = set()
        for node in live_nodes(tree):
            self._collect(node)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or a Computed."""
        try:
            return self._value(node)
        except _UnknownError as error:
            return Computed(_source(node), str(error))
        except (ArithmeticError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            return Computed(_source(node), f"{type(error).__name__}: {error}")

    def mapping(self, node: ast.expr) -> dict[str, Any] | Computed:
        """The value of `**node`: a mapping whose values may be Computed."""
        found = self.value(node)
        if isinstance(found, dict | Computed):
            return found
        return Computed(_source(node), "no mapping")

    # ------------------------------------------------------------------------------------------------ collect

    def _bind(self, name: str, value: ast.expr | Computed, line: int) -> None:
        self._bound[name].append(value)
        self._lines[name].append(line)

    def _collect(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value)
            case ast.NamedExpr(target=target, value=value):
                self._assign(target, value)
            case ast.AugAssign(target=ast.Name(id=name)):
                self._bind(name, Computed(name, f"changed in line {node.lineno}"), node.lineno)
            case ast.For(target=target) | ast.comprehension(target=target):
                self._loop(target)
            case ast.With(items=items):
                for item in items:
                    if item.optional_vars is not None:
                        self._loop(item.optional_vars)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._parameters(node)
            case ast.ClassDef():
                self._fields[node.name] = _class_fields(node)
            case ast.Call(func=ast.Attribute(attr="add_argument")):
                self._option(node)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update" | "append" | "extend" | "pop")):
                self._changed[name] = node.lineno
            case ast.Call(func=ast.Name(id=name)) if node.args or node.keywords:
                self._called.add(name)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(name, value, target.lineno)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                whole = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(elements)
                for index, element in enumerate(elements):
                    self._assign(element, value.elts[index] if whole else value)  # type: ignore[attr-defined]
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as key)):
                self._items[name].append((key, value))

    def _loop(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._bind(node.id, Computed(node.id, f"bound by the loop in line {node.lineno}"), node.lineno)

    def _parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = function.args
        plain = [*arguments.posonlyargs, *arguments.args]
        defaults = dict(
            zip([a.arg for a in plain[len(plain) - len(arguments.defaults) :]], arguments.defaults, strict=True)
        )
        defaults |= {
            a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None
        }
        for argument in [*plain, *arguments.kwonlyargs]:
            unknown = Computed(argument.arg, f"an argument of {function.name}() in line {function.lineno}")
            default = defaults.get(argument.arg, unknown)
            self._bind(argument.arg, _Parameter(function.name, default, unknown), function.lineno)

    def _option(self, call: ast.Call) -> None:
        keywords = {k.arg: k.value for k in call.keywords}
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        dest = keywords.get("dest")
        if isinstance(dest, ast.Constant):
            name = str(dest.value)
        elif names:
            name = next((n for n in names if n.startswith("--")), names[0]).lstrip("-").replace("-", "_")
        else:
            return
        action = keywords.get("action")
        if "default" in keywords:
            self._options[name] = keywords["default"]
        elif isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            self._options[name] = ast.copy_location(ast.Constant(action.value == "store_false"), call)
        else:
            self._options[name] = Computed(name, f"an option without a default, line {call.lineno}")

    # ------------------------------------------------------------------------------------------------ evaluate

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                if isinstance(value, str | int | float | bool) or value is None:
                    return value
            case ast.Name(id=name):
                return self._name(name)
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return [self._value(element) for element in elements]
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values)
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, self._value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(self._value(left), op, self._value(right))
            case ast.BoolOp(op=op, values=values):
                result = self._value(values[0])
                for other in values[1:]:
                    if bool(result) == isinstance(op, ast.Or):
                        return result
                    result = self._value(other)
                return result
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body if self._value(test) else orelse)
            case ast.JoinedStr(values=parts):
                return "".join(self._part(part) for part in parts)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript(value=inner, slice=index):
                found = self._value(inner)[self._value(index)]
                if isinstance(found, Computed):
                    raise _UnknownError(found.why)
                return found
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                return self._keywords(keywords)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CASTS:
                return _CASTS[name](*(self._value(argument) for argument in args))
            case ast.Call():
                raise _UnknownError(f"a call, line {node.lineno}")
        raise _UnknownError(f"line {node.lineno}")

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in zip(keys, values, strict=True):
            if key is None:
                found |= self._value(value)
            else:
                found[self._value(key)] = self.value(value)
        return found

    def _keywords(self, keywords: list[ast.keyword]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keyword in keywords:
            if keyword.arg is None:
                found |= self._value(keyword.value)
            else:
                found[keyword.arg] = self.value(keyword.value)
        return found

    def _name(self, name: str) -> Any:
        if name in self._changed:
            raise _UnknownError(f"{name} is changed in line {self._changed[name]}")
        bound = self._bound.get(name)
        if not bound:
            raise _UnknownError(f"{name} is bound nowhere in the script")
        if name in self._active:
            raise _UnknownError(f"{name} is bound to itself")
        self._active.add(name)
        try:
            values = [self._bound_value(value) for value in bound]
            if any(type(value) is not type(values[0]) or value != values[0] for value in values[1:]):
                raise _UnknownError(f"{name} is bound in lines {', '.join(map(str, self._lines[name]))}")
            if self._items.get(name) and isinstance(values[0], dict):
                return values[0] | {key: self.value(value) for key, value in self._items[name]}
            return values[0]
        finally:
            self._active.discard(name)

    def _bound_value(self, bound: "ast.expr | Computed | _Parameter") -> Any:
        if isinstance(bound, _Parameter):
            bound = bound.unknown if bound.function in self._called else bound.default
        if isinstance(bound, Computed):
            raise _UnknownError(bound.why)
        return self._value(bound)

    def _attribute(self, node: ast.Attribute) -> Any:
        match node.value:
            case ast.Name(id="torch" | "jnp" | "np" | "TaskType" | "SchedulerType" | "OptimizerNames"):
                return node.attr
            case ast.Name(id="os"):
                raise _UnknownError("the environment decides it")
            case ast.Name(id=owner) if owner in self._fields:
                return self._field(owner, node.attr)
            case ast.Name(id=owner):
                return self._member(owner, node)
        raise _UnknownError(f"an attribute, line {node.lineno}")

    def _member(self, owner: str, node: ast.Attribute) -> Any:
        bound = self._bound.get(owner, [])
        calls = [value for value in bound if isinstance(value, ast.Call | ast.Subscript)]
        if len(bound) != 1 or len(calls) != 1:
            raise _UnknownError(f"{owner} is no options or dataclass of the script")
        call = calls[0].value if isinstance(calls[0], ast.Subscript) else calls[0]
        if not isinstance(call, ast.Call):
            raise _UnknownError(f"line {node.lineno}")
        called = callee(call)
        if called in _PARSERS:
            option = self._options.get(node.attr)
            if option is None:
                raise _UnknownError(f"no option --{node.attr} is declared")
            return self._bound_value(option)
        if called in _DATACLASS_PARSERS:
            owners = [name for name, fields in self._fields.items() if node.attr in fields]
            if len(owners) != 1:
                raise _UnknownError("a field of a library's dataclass: its value comes from the command line")
            return self._field(owners[0], node.attr)
        if called in self._fields:
            given = {k.arg: k.value for k in call.keywords}
            return self._value(given[node.attr]) if node.attr in given else self._field(called, node.attr)
        raise _UnknownError(f"an attribute of what {called}() returns")

    def _field(self, owner: str, name: str) -> Any:
        found = self._fields[owner].get(name)
        if found is None:
            raise _UnknownError(f"{owner} has no field {name}")
        return self._bound_value(found)

    def _part(self, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            if part.format_spec is not None or part.conversion not in (-1, 115):
                raise _UnknownError(f"an f-string with a format, line {part.lineno}")
            return str(self._value(part.value))
        return str(self._value(part))

    def _unary(self, op: ast.unaryop, value: Any) -> Any:
        if isinstance(op, ast.Not):
            return not value
        if isinstance(op, ast.USub):
            return -value
        if isinstance(op, ast.UAdd):
            return +value
        raise _UnknownError("an operator")

    def _binary(self, left: Any, op: ast.operator, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        joined = isinstance(op, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
        if not (numbers or joined) or type(op) not in _ARITHMETIC:
            raise _UnknownError("an operator")
        if isinstance(op, ast.Pow) and (abs(right) > 64 or abs(left) > 1e4):
            raise _UnknownError("a very large number")
        result = _ARITHMETIC[type(op)](left, right)
        if numbers and abs(result) > _MOST_DIGITS:
            raise _UnknownError("a very large number")
        return result


class _Parameter(Computed):
    """A function's argument: its default, unless the function is called with arguments."""

    def __init__(self, function: str, default: ast.expr | Computed, unknown: Computed) -> None:
        super().__init__(unknown.text, unknown.why)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "default", default)
        object.__setattr__(self, "unknown", unknown)

    function: str
    default: ast.expr | Computed
    unknown: Computed


class _UnknownError(Exception):
    """Not known without running the script; says why."""


def callee(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def live_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes in source order, without branches behind a literal False (`if False:`, as notebooks have them)."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Constant):
            children = list(node.body if node.test.value else node.orelse)
        stack.extend(reversed(children))


def _class_fields(node: ast.ClassDef) -> dict[str, ast.expr | Computed]:
    fields: dict[str, ast.expr | Computed] = {}
    for item in node.body:
        match item:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call() as call) if callee(call) in (
                "field",
                "Field",
            ):
                keywords = {k.arg: k.value for k in call.keywords}
                default = keywords.get("default") or (call.args[0] if call.args else None)
                fields[name] = default or Computed(name, f"a field without a plain default, line {item.lineno}")
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                fields[name] = value
            case ast.AnnAssign(target=ast.Name(id=name)):
                fields[name] = Computed(name, f"a field without a default, line {item.lineno}")
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                fields[name] = value
    return fields


def _source(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
