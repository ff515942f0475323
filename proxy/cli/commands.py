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
from cellgate.proxy.cli.tables import choice_text, fleet_table, poison_table, shown, units_table
from cellgate.proxy.config.load_process import ConfigError, Overrides, Reading, read
from cellgate.proxy.config.settings import Address, LogFormat, RedisAccess, Settings
from cellgate.proxy.config.values import MisfitError, address
from cellgate.router.nouns import Fleet

FAILED = 1
WRONG = 2
EXPLAINED = {
    "model": ("NAME", "the model it asks for; none: any"),
    "prompt_tokens": ("N", "how long its prompt is, of which nothing is cached"),
    "session": ("NAME", "whose session it is of"),
    "tenant": ("NAME", "whose it is, where it would have to wait"),
    "priority": ("N", "lower goes first"),
    "ttft_ms": ("MS", "how soon its first token has to be there"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code."""
    args = _parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who read it, such as `head`, has seen enough. What is still buffered must not complain at exit.
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
    reading = Reading(args.config, flags)
    # Late, so that the other commands do not wait for it, and while the configuration is read.
    from cellgate.proxy.app import serve
    from cellgate.proxy.handover.inheritance import NoInheritanceError

    settings = reading.settings()
    try:
        return serve(settings, partial(read, args.config, flags))
    except NoInheritanceError as error:
        return _failed(str(error))
    except OSError as error:
        where = f" on {error.filename}" if error.filename else ""
        return _failed(f"cannot listen{where}: {error.strerror or error}")


def _check(args: argparse.Namespace) -> int:
    from cellgate.proxy.config.load import load  # Late, for a gate that serves does without.

    settings = load(args.config, _flags(args))
    if settings.redis is not None:
        _check_redis(settings.redis)
    where = f"listens on {settings.listen}, admin on {settings.admin}"
    print(f"{args.config or 'flags'}: good; {where}, policy {settings.policy}")
    if settings.sources:
        print("units are discovered as well:", ", ".join(source.title for source in settings.sources))
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
    print(f"{whom}: " + ("drained; what runs there finishes" if drained else "back in rotation"))
    return 0


def _explain(args: argparse.Namespace) -> int:
    asked = {name: getattr(args, name) for name in EXPLAINED}
    found = admin_client.explain(args.admin, {name: value for name, value in asked.items() if value})
    print(json.dumps(found, indent=2) if args.json else choice_text(found))
    return 0


def _poison(args: argparse.Namespace) -> int:
    if args.action == "clear":
        cleared = admin_client.clear_poison(args.admin, args.fingerprint)
        lines = [f"{name}: may be asked again" for name in cleared] or ["no prompt was refused"]
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
    _add_settings(command("check", _check, "find every problem of a configuration, or show its units"))
    agent.add_arguments(command("agent", agent.run, "watch the processes that a node of a unit needs"))
    plan.add_arguments(command("plan", plan.run, "tell how much of a model fits into a unit"))
    units = command("units", _units, "show what a running gate believes of its units")
    units.add_argument("--json", action="store_true", help="all that is known, as JSON")
    top = command("top", _top, "watch a running gate's units: what needs a look comes first")
    top.add_argument("--once", action="store_true", help="draw once and end, as without a terminal")
    why = command("why", _why, "tell why a unit is in or out of rotation, and what happens next")
    drain = command(
        "drain", partial(_set_drain, True), "take a unit out of rotation; what runs there finishes"
    )
    undrain = command("undrain", partial(_set_drain, False), "put a drained unit back into rotation")
    why.add_argument("name", metavar="NAME", help="the name of the unit")
    for added in (drain, undrain):
        whom = added.add_mutually_exclusive_group(required=True)
        whom.add_argument("name", metavar="NAME", nargs="?", help="the name of the unit")
        whom.add_argument("--cell", metavar="NAME", help="all units of this cell")
    explain = command(
        "explain", _explain, "tell where a request would go now, and what it would cost on each unit"
    )
    for name, (metavar, tells) in EXPLAINED.items():
        explain.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=tells)
    explain.add_argument("--json", action="store_true", help="all that is known, as JSON")
    poison = command("poison", _poison, "show the prompts that are refused because units have died of them")
    poison.add_argument("action", choices=["clear"], nargs="?", help="let them be asked again")
    poison.add_argument("fingerprint", metavar="FINGERPRINT", nargs="?", help="only this one")
    poison.add_argument("--json", action="store_true", help="all that is known, as JSON")
    admin = str(Settings(fleet=Fleet()).admin)
    for added in (units, top, why, drain, undrain, explain, poison):
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
        help="the configuration (docs/configuration.md); flags win over it",
    )
    add("--workers", metavar="N", type=_number, help="how many processes serve clients (docs/workers.md)")
    add("--listen", metavar="HOST:PORT", help="where requests come in")
    add("--admin", metavar="HOST:PORT", help="where the admin port is")
    add(
        "--unit",
        metavar="[NAME=]URL",
        action="append",
        default=[],
        help="a unit; may be repeated, replaces the file's cells",
    )
    add("--policy", metavar="NAME", help="how units are ranked: " + ", ".join(POLICIES))
    add("--redis", metavar="URL", help="where gates tell each other of their units (docs/redis.md)")
    add("--access-log", metavar="FORMAT", help="one of " + ", ".join(get_args(LogFormat)))


def _number(text: str) -> int | str:
    """A number where it is one; what is wrong with anything else is said as of the file."""
    return int(text) if text.lstrip("-").isdecimal() else text


def _address(text: str) -> Address:
    try:
        return address(text)
    except MisfitError as error:
        raise argparse.ArgumentTypeError(f"expected {error.expected}, found {text!r}") from None
