"""Cost per round of privacy accounting in a long run, compared with dp-accounting's epsilon of all rounds at once.

python benchmarks/accountant.py                        (about three minutes on one core)

A round needs the epsilon of all rounds so far. The table shows means over a window of rounds, since most rounds of a
long run reuse a value computed for a few more rounds (`epsilon_so_far`).
"""

from __future__ import annotations

import argparse
import time

from consilience.privacy import Mechanism, epsilon_so_far

DELTA = 1e-5
ROUNDS = (10, 100, 1000, 10_000)


def in_one_go(mechanism: Mechanism, rounds: int) -> float:
    """The library's own composition of all rounds at once."""
    from dp_accounting.pld import privacy_loss_distribution

    one = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=mechanism.noise, sampling_prob=mechanism.rate
    )
    return float(one.self_compose(rounds).get_epsilon_for_delta(DELTA))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", type=int, default=64, help="rounds over which a round's time is averaged")
    given = parser.parse_args()
    print("| noise | rate | round | ms a round | against round 10 | epsilon | in one go | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for mechanism in (Mechanism(1.0, 0.1), Mechanism(4.0, 1.0), Mechanism(0.6, 0.02)):
        epsilon_so_far({mechanism: 1}, DELTA)
        first = 0.0
        for rounds in ROUNDS:
            window = min(given.window, rounds - 1)
            epsilon_so_far({mechanism: rounds - window}, DELTA)  # what the round before has left behind
            began = time.process_time()
            for number in range(rounds - window + 1, rounds + 1):
                found = epsilon_so_far({mechanism: number}, DELTA)
            cost = 1000 * (time.process_time() - began) / window
            first = first or cost
            true = in_one_go(mechanism, rounds)
            print(
                f"| {mechanism.noise:g} | {mechanism.rate:g} | {rounds} | {cost:.1f} | {cost / first:.2f} "
                f"| {found:.4f} | {true:.4f} | {found / true:.5f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
