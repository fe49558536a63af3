"""slime's own ``parse_args`` on the flags of a launch script, in the Python that has slime's requirements. Files that
are not here are noted and replaced, so that one missing file does not hide the other findings.

    python parse.py REQUEST.json LOG

Uses the standard library and slime. REQUEST: ``flags``, ``launcher``, ``standins``, ``slime``, ``scratch``, ``path``
(the job's PYTHONPATH), ``settings`` (ours of the job's environment). A line of JSON is appended to LOG: ``args``,
``options``, ``refused``, ``skipped`` (checks without a package), ``missing``, ``unimportable``, ``hints`` (names that
exist, by argument), ``real`` (the packages that are no stand-ins).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PATHS = ("ref_load", "opd_teacher_load")
_FILES = ("custom_config_path", "eval_config", "megatron_config_path")
_NAMED = re.compile(r"^[A-Za-z_]\w*(\.\w+)+$")
_OUR_FILES = ("agl_tasks", "agl_eval_tasks", "agl_job_template", "agl_replay_files")


def main(request: dict[str, Any]) -> dict[str, Any]:
    sys.path[:0] = [*request["path"], request["slime"]]
    real = [name for name in ("megatron.training", "sglang.srt", "sglang_router") if _importable(name)]
    if "megatron.training" not in real or "sglang.srt" not in real:
        sys.path.insert(0, request["standins"])
    options = _collect_options()
    from slime.utils import arguments

    answer: dict[str, Any] = {"refused": [], "skipped": [], "missing": {}, "unimportable": {}, "hints": {}}
    answer |= {"real": real, "args": None}
    raw: dict[str, Any] = {}
    _replace_validation(arguments, answer, raw, request["scratch"])
    if request["launcher"] == "agl_slime.train.slime.launch":
        from agl_slime.train.slime.launch import extend_parser

        extend_parser()
    sys.argv = ["train.py", *request["flags"]]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args = vars(arguments.parse_args())
    except SystemExit:
        lines = [line for line in errors.getvalue().splitlines() if "error:" in line]
        answer["refused"].append((lines or ["error: the flags cannot be parsed"])[-1].partition("error: ")[2])
        args = raw or None
    except Exception as error:
        answer["refused"].append(str(error) or repr(error))
        args = raw or None
    answer["options"] = sorted(options)
    if args is not None:
        answer["args"] = {name: value for name, value in args.items() if _plain(value)}
        datasets = args.get("eval_datasets") or ()
        answer["args"]["eval_datasets"] = [vars(dataset) for dataset in datasets if _plain(vars(dataset))]
        answer["args"] = {**request["settings"], **answer["args"]}
        _resolve(answer["args"], answer)
    return answer


def _collect_options() -> set[str]:
    """The options of every parser that is used from here on."""
    options: set[str] = set()
    parse = argparse.ArgumentParser.parse_known_args

    def collecting(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        options.update(self._option_string_actions)
        return parse(self, *arguments, **named)

    argparse.ArgumentParser.parse_known_args = collecting  # type: ignore[method-assign]
    return options


def _replace_validation(arguments: Any, answer: dict[str, Any], raw: dict[str, Any], scratch: str) -> None:
    """Have slime's checks run with stand-ins of missing files, and continue after a refusal."""
    import transformers
    from slime.backends.megatron_utils import arguments as backend

    load, standin = transformers.AutoConfig.from_pretrained, SimpleNamespace()

    def config(path: str, **named: Any) -> Any:
        if not Path(path).is_dir():
            answer["missing"]["hf_checkpoint"] = path
            return standin
        return load(path, **named)

    transformers.AutoConfig.from_pretrained = config  # type: ignore[method-assign, assignment]
    for name, function in [*vars(backend).items()]:
        if inspect.isfunction(function) and "hf_config" in inspect.signature(function).parameters:
            skipped = lambda *values, check=function: None if standin in values else check(*values)  # noqa: E731
            setattr(backend, name, skipped)
    validate = _collecting(arguments.slime_validate_args, answer["refused"])

    def checked(args: Any) -> None:
        absent = {name: getattr(args, name, None) for name in (*_PATHS, *_FILES)}
        absent = {name: path for name, path in absent.items() if isinstance(path, str) and not Path(path).exists()}
        answer["missing"] |= absent
        for name in absent:
            setattr(args, name, scratch if name in _PATHS else None)
        engines, args.rollout_external_engine_addrs = args.rollout_external_engine_addrs, None  # which run elsewhere
        load_from, ref_load = args.load, args.ref_load
        interval, args.eval_interval = args.eval_interval, None if "eval_config" in absent else args.eval_interval
        args.ref_load = args.ref_load or scratch  # the checks have a sentence of their own
        raw.update(vars(args))
        try:
            validate(args)
        except Exception as error:  # mostly of a file: the other checks run without it
            answer["skipped" if isinstance(error, ImportError) else "refused"].append(str(error) or repr(error))
            for name in (*_FILES, "eval_interval"):
                setattr(args, name, None)
            with contextlib.suppress(Exception):
                validate(args)
        if args.load == args.ref_load:
            args.load = load_from
        args.ref_load = ref_load
        args.eval_interval = interval if args.eval_interval is None else args.eval_interval  # of --custom-config-path
        for name, path in absent.items():
            setattr(args, name, path)
        args.rollout_external_engine_addrs, args.rollout_external = engines, engines is not None
        raw.update(vars(args))

    arguments.slime_validate_args = checked


class _Collecting(ast.NodeTransformer):
    """slime's checks, which all run: a refusal ends no later check, and leaves no argument without its final value."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        refused = self._call(node.msg or ast.Constant(ast.unparse(node.test)))
        return ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), node.test), [refused], []), node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.copy_location(self._call(node.exc), node) if node.exc else node

    def _call(self, text: ast.expr) -> ast.stmt:
        return ast.Expr(ast.Call(ast.Name("_refuse", ast.Load()), [text], []))


def _collecting(function: Any, refused: list[str]) -> Any:
    tree = ast.fix_missing_locations(_Collecting().visit(ast.parse(inspect.getsource(function))))
    names = {**function.__globals__, "_refuse": lambda error: refused.append(str(error) or repr(error))}
    exec(compile(tree, inspect.getfile(function), "exec"), names)
    return names[function.__name__]


def _resolve(args: dict[str, Any], answer: dict[str, Any]) -> None:
    """Note the objects that slime's flags and our settings name and that cannot be imported, our files that are
    missing, and the nearest names that exist."""
    from agl_slime.loop.task_files import split_slice
    from agl_slime.tools.rehearse.names import near_file, unresolved, unresolved_elsewhere

    args = {name: value for name, value in args.items() if isinstance(value, str)}  # the checks name other types
    missing = {name: args[name] for name in _OUR_FILES if args.get(name)}
    missing = {name: path for name, path in missing.items() if not split_slice(path)[0].exists()}
    python = args.get("agl_controller_python") or os.environ.get("AGL_CONTROLLER_PYTHON") or ""
    runs = bool(python) and shutil.which(python) is not None
    if args.get("agl_controller_python") and not runs:
        missing["agl_controller_python"] = python
    if (log := args.get("agl_controller_log")) and not Path(log).absolute().parent.is_dir():
        missing["agl_controller_log"] = log
    answer["missing"] |= missing
    answer["hints"] |= {name: near_file(split_slice(path)[0]) for name, path in answer["missing"].items()}
    objects = {name: value for name, value in args.items() if name.endswith("_path") and _NAMED.match(value)}
    objects = {name: value for name, value in objects.items() if not os.path.exists(value)}
    problems = {name: unresolved(value) for name, value in objects.items()}
    if agent := args.get("agl_agent"):
        sys.path.insert(0, os.getcwd())  # as the agent's loader does
        if ":" not in agent:
            hint = ":".join(agent.rpartition(".")[::2])
            problems["agl_agent"] = "expected module:Class or file.py:Class", "" if unresolved(hint) else hint
        elif args.get("agl_runners") != "controller":
            problems["agl_agent"] = unresolved(agent)
        elif runs:
            problems["agl_agent"] = unresolved_elsewhere(agent, python)
    for name, problem in problems.items():
        if problem is not None:
            answer["unimportable"][name], answer["hints"][name] = problem


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


if __name__ == "__main__":
    with open(sys.argv[2], "a") as log:
        log.write(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))) + "\n")
