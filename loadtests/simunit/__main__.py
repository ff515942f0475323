"""`python -m loadtests.simunit`: a unit, that is a leader which starts its followers."""

import argparse
import dataclasses

import uvloop

from loadtests.simunit.leader import LeaderOptions, run_leader
from loadtests.simunit.poison import MODES
from loadtests.simunit.sequence import Timing


def main() -> int:
    """Run a leader; return its exit status."""
    options = vars(_parser().parse_args())
    try:
        timing = Timing(**{field.name: options.pop(field.name) for field in dataclasses.fields(Timing)})
        return uvloop.run(run_leader(LeaderOptions(**options), timing))
    except (ValueError, OSError, TimeoutError) as error:
        raise SystemExit(f"{options['name']}: the unit did not start: {error}") from error


def _parser() -> argparse.ArgumentParser:
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.simunit", description=__doc__, formatter_class=defaults
    )
    parser.add_argument("--name", default="sim", help="the unit's name")
    parser.add_argument("--model", default="sim", help="the model's name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 finds a free one")
    parser.add_argument("--followers", type=int, default=1, help="follower processes")
    parser.add_argument("--warm-up-s", type=float, default=0.0, help="extra time of the first step")
    parser.add_argument("--until-stdin-ends", action="store_true", help="exit when standard input is closed")
    parser.add_argument("--await-port", action="store_true", help="listen when the port becomes free")
    parser.add_argument(
        "--can-pause", type=int, default=0, choices=(0, 1), help="1: it has /pause, /resume and /is_paused"
    )
    parser.add_argument(
        "--logprobs", type=int, default=0, choices=(0, 1), help="1: whole answers show log probabilities"
    )
    parser.add_argument("--blind", type=int, default=0, choices=(0, 1), help="1: it has no /metrics")
    parser.add_argument(
        "--poison", default="", choices=["", *MODES], help="how it dies of one certain prompt"
    )
    for field in dataclasses.fields(Timing):
        kind = float if field.type is float else int
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help="timing"
        )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
