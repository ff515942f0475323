"""`python -m loadtests.simunit leader|follower`: the two kinds of process that make a unit."""

import argparse
import dataclasses

from loadtests.simunit.poison import MODES
from loadtests.simunit.sequence import Timing


def main() -> int:
    """Run one process of a unit; return its exit status. What only a leader needs is imported only there."""
    options = vars(_parser().parse_args())
    if options.pop("kind") == "follower":
        from loadtests.simunit.follower import run_follower

        run_follower(**options)
        return 0

    import uvloop

    from loadtests.simunit.leader import LeaderOptions, run_leader

    try:
        timing = Timing(**{field.name: options.pop(field.name) for field in dataclasses.fields(Timing)})
        return uvloop.run(run_leader(LeaderOptions(**options), timing))
    except (ValueError, OSError, TimeoutError) as error:
        raise SystemExit(f"{options['name']}: the unit did not start: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.simunit", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    follower = kinds.add_parser("follower", help="one follower; leaders start their own")
    follower.add_argument("--rank", type=int, required=True)
    follower.add_argument("--leader-port", type=int, required=True)

    defaults = argparse.ArgumentDefaultsHelpFormatter
    leader = kinds.add_parser(
        "leader", help="a unit: a leader that starts its followers", formatter_class=defaults
    )
    leader.add_argument("--name", default="sim", help="the unit's name")
    leader.add_argument("--model", default="sim", help="the model's name")
    leader.add_argument("--host", default="127.0.0.1", help="address to listen on")
    leader.add_argument("--port", type=int, default=0, help="0 finds a free one")
    leader.add_argument("--followers", type=int, default=1, help="follower processes")
    leader.add_argument("--warm-up-s", type=float, default=0.0, help="extra time of the first step")
    leader.add_argument("--until-stdin-ends", action="store_true", help="exit when standard input is closed")
    leader.add_argument("--await-port", action="store_true", help="listen when the port becomes free")
    leader.add_argument(
        "--can-pause", type=int, default=0, choices=(0, 1), help="1: it has /pause, /resume and /is_paused"
    )
    leader.add_argument(
        "--poison", default="", choices=["", *MODES], help="how it dies of one certain prompt"
    )
    for field in dataclasses.fields(Timing):
        kind = float if field.type is float else int
        leader.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help="timing"
        )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
