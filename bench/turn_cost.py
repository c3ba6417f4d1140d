"""What one more turn costs the control plane: `python -m bench.turn_cost [--rounds N] [--quick]`.

Plays the same number of episodes with few and with many turns (bench/scale.py's run: real server, workflows and worker,
simulated work) and divides the difference in processor time by the difference in turns: what belongs to an episode and
not to a turn (its start, sandbox, verdict, row) falls out, and is given beside it. The last line is JSON with
`cpu_ms_per_turn`, `server_cpu_ms_per_turn`, `worker_cpu_ms_per_turn` and `cpu_ms_per_episode` without turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from bench.measure import finish, median_of, say, table
from bench.own_stack import OwnStack, own_stack
from bench.scale import measure

FEW, MANY = 2, 12
EPISODES = 64


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the medians are given")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds = 1
    return options


def slopes(few: Mapping[str, float], many: Mapping[str, float]) -> dict[str, float]:
    """CPU-ms per turn by process, and what is left per episode, from two measurements of bench.scale."""
    per_turn = {name: (many[name] - few[name]) / (MANY - FEW) for name in ("server_cpu_ms", "rollout_cpu_ms")}
    total = sum(per_turn.values())
    return {
        "server": per_turn["server_cpu_ms"],
        "worker": per_turn["rollout_cpu_ms"],
        "turn": total,
        "episode": few["cpu_ms_per_episode"] - FEW * total,
        "events": (many["episode_events"] - few["episode_events"]) / (MANY - FEW),
    }


async def one(stack: OwnStack, episodes: int) -> dict[str, float]:
    """One round on a server that is up."""
    few, many = [
        await measure(stack, episodes, argparse.Namespace(turns=turns, seconds=0.0, most_real=episodes))
        for turns in (FEW, MANY)
    ]
    return slopes(few, many)


def main() -> None:
    options = arguments()
    rounds = []
    for number in range(options.rounds):
        # A server of its own each time: its store grows with what it has seen.
        with own_stack(None, ("temporal",)) as stack:
            rounds.append(asyncio.run(one(stack, options.episodes)))
        say(f"round {number + 1}: {rounds[-1]['turn']:.1f} CPU-ms a turn")
    found = median_of(rounds)
    print(f"{options.episodes} episodes of {FEW} and of {MANY} turns, medians of {options.rounds} round(s), CPU-ms\n")
    print(table(["per turn", "server", "worker", "per episode without turns", "events per turn"], [_row(found)]))
    finish(
        {
            "cpu_ms_per_turn": round(found["turn"], 2),
            "server_cpu_ms_per_turn": round(found["server"], 2),
            "worker_cpu_ms_per_turn": round(found["worker"], 2),
            "cpu_ms_per_episode": round(found["episode"], 1),
            "rounds": options.rounds,
        }
    )
    sys.stdout.flush()
    # The SDK's threads can abort the interpreter at its normal exit.
    os._exit(0)


def _row(found: Mapping[str, float]) -> list[float]:
    return [found[name] for name in ("turn", "server", "worker", "episode", "events")]


if __name__ == "__main__":
    main()
