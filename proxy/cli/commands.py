"""The command line: `serve` and `check` read the configuration, `agent` runs on a node of a unit, the others
talk to a running gate.

Exit codes: 0 done, 1 it did not work, 2 the command or the configuration is wrong. A failure is one line
on stderr, a wrong configuration one line for each problem.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

from cellgate import VERSION
from cellgate.policies import POLICIES
from cellgate.probes import agent
from cellgate.proxy.cli import admin_client, plan
from cellgate.proxy.cli.tables import explain_text, fleet_table, poison_table, shown, units_table
from cellgate.proxy.config.load_process import ConfigError, ConfigReader, Overrides, read_settings
from cellgate.proxy.config.settings import Address, LogFormat, RedisAccess, Settings
from cellgate.proxy.config.values import MisfitError, address
from cellgate.router.nouns import Fleet

FAILED = 1
WRONG = 2
_DRAINED = "drained: no new requests, those in flight finish"
_UNDRAINED = "no longer drained: gets requests as soon as its verdict allows"
_CONDUCTED = {
    "pause": "drained and paused (mode {mode}); cellgate resume {unit} lets it go on",
    "sleep": "drained and asleep (mode {mode}); cellgate wake {unit} wakes it",
    "resume": "resumed and undrained; it gets requests once a canary has passed",
    "wake": "awake and undrained; it gets requests once a canary has passed",
}
_CONDUCTS = {
    "pause": "drain a unit and pause its engine",
    "resume": "let a paused engine go on; its unit is undrained once a canary has passed",
    "sleep": "drain a unit and put its engine to sleep",
    "wake": "wake a sleeping engine; its unit is undrained once a canary has passed",
}
EXPLAINED = {
    "model": ("NAME", "the requested model; default: any"),
    "prompt_tokens": ("N", "the length of the prompt, none of it cached"),
    "session": ("NAME", "the session it belongs to"),
    "tenant": ("NAME", "the tenant, for fair sharing of the queue"),
    "priority": ("N", "the priority; lower goes first"),
    "ttft_ms": ("MS", "the deadline for the first token"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    args = _parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Buffered output must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ConfigError as error:
        print(*error.problems, sep="\n", file=sys.stderr)
        return WRONG
    except admin_client.AdminError as error:
        return _failed(str(error))


def _failed(why: str) -> int:
    print(f"cellgate: {why}", file=sys.stderr)
    return FAILED


# Commands: each takes the parsed arguments and gives the exit code.


def _serve(args: argparse.Namespace) -> int:
    flags = _flags(args)
    reading = ConfigReader(args.config, flags)
    # Imported late, so that other commands do not wait for it, and while the configuration is read.
    from cellgate.proxy.handover.inheritance import NoInheritanceError
    from cellgate.proxy.serve import serve

    settings = reading.settings()
    try:
        return serve(settings, partial(read_settings, args.config, flags))
    except NoInheritanceError as error:
        return _failed(str(error))
    except OSError as error:
        where = f" on {error.filename}" if error.filename else ""
        return _failed(f"cannot listen{where}: {error.strerror or error}")


def _check(args: argparse.Namespace) -> int:
    from cellgate.proxy.config.load import load  # Imported late, because a serving gate does not need it.

    settings = load(args.config, _flags(args))
    if settings.redis is not None:
        _check_redis(settings.redis)
    where = f"listens on {settings.listen}, admin on {settings.admin}"
    print(f"{args.config or 'flags'}: valid; {where}, policy {settings.policy}")
    if settings.sources:
        print("more units are discovered from:", ", ".join(source.title for source in settings.sources))
    from cellgate.proxy.cli.detection_table import times_text  # Late, because it asks the gate's own modules.

    print(fleet_table(settings.fleet), times_text(settings.fleet, settings.rules), sep="\n\n")
    return 0


def _check_redis(access: RedisAccess) -> None:
    """Raises ConfigError for a URL that a gate would serve without."""
    from cellgate.proxy.sharing.connect import connector  # Late, as above.

    try:
        connector(access)
    except ValueError as error:
        raise ConfigError([f"redis: {error}"]) from None


def _units(args: argparse.Namespace) -> int:
    units = admin_client.units(args.admin)
    print(json.dumps(units, indent=2) if args.json else units_table(units))
    return 0


def _top(args: argparse.Namespace) -> int:
    from cellgate.proxy.cli import top  # Late: no other command needs what it draws with.

    return top.run(args.admin, once=args.once)


def _why(args: argparse.Namespace) -> int:
    print(*map(shown, admin_client.why(args.admin, args.name)), sep="\n")
    return 0


def _set_drain(drained: bool, args: argparse.Namespace) -> int:
    if args.cell is None:
        admin_client.set_drain(args.admin, args.name, drained=drained)
        whom = args.name
    else:
        units = admin_client.set_cell_drain(args.admin, args.cell, drained=drained)
        whom = f"cell {args.cell} ({', '.join(units)})"
    print(f"{whom}: " + (_DRAINED if drained else _UNDRAINED))
    return 0


def _conduct(deed: str, args: argparse.Namespace) -> int:
    mode = admin_client.conduct(args.admin, args.name, deed, getattr(args, "mode", None))
    print(f"{args.name}: " + _CONDUCTED[deed].format(unit=args.name, mode=mode))
    return 0


def _explain(args: argparse.Namespace) -> int:
    asked = {name: getattr(args, name) for name in EXPLAINED}
    found = admin_client.explain(args.admin, {name: value for name, value in asked.items() if value})
    print(json.dumps(found, indent=2) if args.json else explain_text(found))
    return 0


def _poison(args: argparse.Namespace) -> int:
    if args.action == "clear":
        cleared = admin_client.clear_poison(args.admin, args.fingerprint)
        lines = [f"{name}: no longer refused" for name in cleared] or ["no prompt is refused"]
        print(*lines, sep="\n")
        return 0
    found = admin_client.poison(args.admin)
    print(json.dumps(found, indent=2) if args.json else poison_table(found))
    return 0


def _flags(args: argparse.Namespace) -> Overrides:
    return Overrides(
        args.listen,
        args.admin,
        tuple(args.unit),
        args.policy,
        args.access_log,
        redis=args.redis,
        workers=args.workers,
        on_terminal=sys.stdout.isatty(),
    )


# Arguments.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("cellgate", description="A gate in front of inference units.")
    parser.add_argument("--version", action="version", version=f"cellgate {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], does: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=does, description=f"{does.capitalize()}.")
        added.set_defaults(run=run)
        return added

    _add_settings(command("serve", _serve, "run the gate"))
    _add_settings(command("check", _check, "check a configuration: list every problem, or show its units"))
    agent.add_arguments(command("agent", agent.run, "watch the processes of one node of a unit"))
    plan.add_arguments(command("plan", plan.run, "compute how much of a model fits into a unit"))
    units = command("units", _units, "list the units of a running gate with their verdicts")
    units.add_argument("--json", action="store_true", help="everything, as JSON")
    top = command("top", _top, "watch the units of a running gate, problems first")
    top.add_argument("--once", action="store_true", help="print one picture and exit")
    why = command("why", _why, "explain why a unit is in or out of rotation, and what happens next")
    drain = command(
        "drain", partial(_set_drain, True), "take a unit out of rotation; requests in flight finish"
    )
    undrain = command("undrain", partial(_set_drain, False), "put a drained unit back into rotation")
    why.add_argument("name", metavar="NAME", help="the name of the unit")
    conducts = [command(deed, partial(_conduct, deed), does) for deed, does in _CONDUCTS.items()]
    for added in conducts:
        added.add_argument("name", metavar="NAME", help="the name of the unit")
    for added in conducts[::2]:
        added.add_argument("--mode", metavar="MODE", help="what becomes of its requests: wait, abort, keep")
    for added in (drain, undrain):
        whom = added.add_mutually_exclusive_group(required=True)
        whom.add_argument("name", metavar="NAME", nargs="?", help="the name of the unit")
        whom.add_argument("--cell", metavar="NAME", help="all units of this cell")
    explain = command("explain", _explain, "show where a request would go now, and its cost on each unit")
    for name, (metavar, tells) in EXPLAINED.items():
        explain.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=tells)
    explain.add_argument("--json", action="store_true", help="everything, as JSON")
    poison = command("poison", _poison, "list the prompts that are refused because they ended units")
    poison.add_argument("action", choices=["clear"], nargs="?", help="stop refusing them")
    poison.add_argument("fingerprint", metavar="FINGERPRINT", nargs="?", help="only this one")
    poison.add_argument("--json", action="store_true", help="everything, as JSON")
    admin = str(Settings(fleet=Fleet()).admin)
    for added in (units, top, why, drain, undrain, *conducts, explain, poison):
        added.add_argument(
            "--admin", metavar="HOST:PORT", type=_address, default=admin, help="default: %(default)s"
        )
    return parser


def _add_settings(command: argparse.ArgumentParser) -> None:
    """The flags that make settings; without one, the file decides, and without a file the default."""
    add = command.add_argument
    add(
        "-c",
        dest="config",
        metavar="FILE",
        help="the configuration (docs/configuration.md); flags override it",
    )
    add(
        "--workers",
        metavar="N",
        type=_number,
        help="the number of processes that serve clients (docs/workers.md)",
    )
    add("--listen", metavar="HOST:PORT", help="the address for requests")
    add("--admin", metavar="HOST:PORT", help="the address of the admin port")
    add(
        "--unit",
        metavar="[NAME=]URL",
        action="append",
        default=[],
        help="a unit; can be repeated; replaces the cells of the file",
    )
    add("--policy", metavar="NAME", help="how units are ranked: " + ", ".join(POLICIES))
    add("--redis", metavar="URL", help="the Redis that gates share (docs/redis.md)")
    add("--access-log", metavar="FORMAT", help="one of " + ", ".join(get_args(LogFormat)))


def _number(text: str) -> int | str:
    """A number where it is one; what is wrong with anything else is said as of the file."""
    return int(text) if text.lstrip("-").isdecimal() else text


def _address(text: str) -> Address:
    try:
        return address(text)
    except MisfitError as error:
        raise argparse.ArgumentTypeError(f"expected {error.expected}, found {text!r}") from None
