"""A mypy plugin, ``plugins = ["fastloop_tools.mypy_plugin"]``: reports hooks and hook arguments that do not exist.

It applies the checks of ``plugins.checks`` to the source code. It knows the hooks of the core, those in the class's
``hookspecs``, and those of the plugins in its ``requires``. Errors have the code ``fastloop``. Only mypy imports this
module.

Stubs type calls of hooks (``core/fastloop/hook_types.pyi``), and not the name of a new method, so they cannot report a
hook that does not exist.
"""

from __future__ import annotations

import difflib
import inspect
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from mypy.errorcodes import ErrorCode
from mypy.nodes import (
    AssignmentStmt,
    CallExpr,
    Decorator,
    Expression,
    FuncDef,
    MypyFile,
    NameExpr,
    RefExpr,
    StrExpr,
    TupleExpr,
    TypeInfo,
)
from mypy.plugin import AttributeContext, ClassDefContext, Plugin, ReportConfigContext
from mypy.types import Type

from fastloop import hookspecs
from fastloop.errors import PluginError
from fastloop.plugins.declarations import CLOSE
from fastloop.plugins.hook_checks import check_argument, unknown_hook
from fastloop.plugins.installed import load

BASE, MARK = "fastloop.plugins.plugin.Plugin", "fastloop.plugins.plugin.hookimpl"
CALLERS = "fastloop.plugins.call.HookCallers."
FASTLOOP = ErrorCode("fastloop", "A hook does not exist, or has other arguments", "fastloop")


def declared(namespace: Any) -> dict[str, list[str]]:
    """Hook -> its arguments, for the functions of a class or module that are marked with ``hookspec``."""
    marked = {name: spec for name, spec in getattr(namespace, "__dict__", {}).items() if hasattr(spec, "fastloop_spec")}
    return {name: [key for key in inspect.signature(spec).parameters if key != "self"] for name, spec in marked.items()}


CORE = declared(hookspecs)


def hooks_of(info: TypeInfo, name: str) -> dict[str, list[str]] | None:
    """The hooks that a class may implement, with their arguments. None: not known, because a required plugin cannot be
    imported."""
    own = [base.metadata.get("fastloop", {}) for base in info.mro]
    known = CORE | {hook: arguments for data in own for hook, arguments in data.get("hooks", {}).items()}
    required = {plugin for data in own for plugin in data.get("requires", ()) if not plugin.startswith("slot:")}
    try:
        for plugin in required if name not in known else ():  # imported only then
            known |= declared(load(plugin).hookspecs)
    except PluginError:
        return None
    return known


def read_declarations(ctx: ClassDefContext) -> None:
    """Store the class's ``hookspecs`` and ``requires`` in its metadata, which mypy's cache keeps for subclasses in
    other modules."""
    data = ctx.cls.info.metadata.setdefault("fastloop", {})
    for line in ctx.cls.defs.body:
        match line:
            case AssignmentStmt(lvalues=[NameExpr(name="requires")], rvalue=TupleExpr(items=items)):
                data["requires"] = [item.value for item in items if isinstance(item, StrExpr)]
            case AssignmentStmt(
                lvalues=[NameExpr(name="hookspecs")], rvalue=RefExpr(node=MypyFile() | TypeInfo() as namespace)
            ):
                specs = {
                    name: symbol.node.func
                    for name, symbol in namespace.names.items()
                    if isinstance(symbol.node, Decorator)
                }
                data["hooks"] = {
                    name: [str(key) for key in spec.arg_names if key != "self"] for name, spec in specs.items()
                }


def implementations(info: TypeInfo) -> Iterator[tuple[str, FuncDef, dict[str | None, Expression]]]:
    """``(hook, method, arguments of @hookimpl)`` for each hook that the body of a class implements."""
    for name, method in (
        (name, symbol.node) for name, symbol in info.names.items() if isinstance(symbol.node, Decorator)
    ):
        for mark in method.original_decorators:
            marks = dict(zip(mark.arg_names, mark.args, strict=True)) if isinstance(mark, CallExpr) else {}
            callee, other = mark.callee if isinstance(mark, CallExpr) else mark, marks.get("specname")
            if isinstance(callee, RefExpr) and callee.fullname == MARK:
                yield other.value if isinstance(other, StrExpr) else name, method.func, marks


def check_class(ctx: ClassDefContext) -> None:
    """Report the hooks of a plugin's class that do not exist or take unknown arguments."""
    read_declarations(ctx)
    for hook, method, marks in implementations(ctx.cls.info):
        known = hooks_of(ctx.cls.info, hook)
        if known is None or (hook not in known and "optionalhook" in marks):
            continue
        try:
            if hook not in known:
                raise PluginError(unknown_hook(hook, known))
            for argument in (
                argument for argument in method.arguments[not method.is_static :] if not argument.kind.is_star()
            ):
                kind = (
                    inspect.Parameter.KEYWORD_ONLY
                    if argument.kind.is_named()
                    else inspect.Parameter.POSITIONAL_OR_KEYWORD
                )
                default = ... if argument.kind.is_optional() else inspect.Parameter.empty
                check_argument(hook, known[hook], inspect.Parameter(argument.variable.name, kind, default=default))
        except PluginError as error:
            ctx.api.fail(str(error), method, code=FASTLOOP)


def check_call(ctx: AttributeContext, name: str) -> Type:
    """Report ``run.hooks.NAME`` where the name is close to a hook of the core and no plugin of the class declares
    it."""
    scopes = reversed(ctx.api.scope.stack)  # type: ignore[attr-defined]
    known = next((hooks_of(scope, name) for scope in scopes if isinstance(scope, TypeInfo)), CORE)
    close = difflib.get_close_matches(name, CORE, n=1, cutoff=CLOSE)
    if close and known is not None and name not in known:
        ctx.api.fail(f"run.hooks has no hook {name!r}. Did you mean {close[0]!r}?", ctx.context, code=FASTLOOP)
    return ctx.default_attr_type


class FastloopPlugin(Plugin):
    """Checks subclasses of ``fastloop.Plugin`` and calls of ``run.hooks``."""

    def report_config_data(self, ctx: ReportConfigContext) -> int:
        return zlib.crc32(repr(CORE).encode())  # with other hooks, mypy ignores its cache

    def get_base_class_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        info = getattr(self.lookup_fully_qualified(fullname), "node", None)
        return check_class if isinstance(info, TypeInfo) and info.has_base(BASE) else None

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        name = fullname.removeprefix(CALLERS)
        return None if name == fullname else lambda ctx: check_call(ctx, name)


def plugin(version: str) -> type[Plugin]:  # mypy calls it
    """The class of the mypy plugin."""
    return FastloopPlugin
