"""The fault campaign by hand: `python tests/failures/faults.py --cases 5000`; campaign.py says what a case is.

The cases are those of test_campaign.py and more. It tells what it has done after every hundred cases of a link,
with the seed to go on from (`--first`), and ends with a summary; exit code 1 when something was wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import search_path  # noqa: F401 - with it the other helpers are found

# isort: split
import campaign_cases
import campaign_runner

CHUNK = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000, help="in all, shared out among the links")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--links", default=",".join(campaign_cases.LINKS))
    options = parser.parse_args()
    links = options.links.split(",")
    last = options.first + -(-options.cases // len(links))
    kinds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    found: list[str] = []
    start = time.monotonic()
    for link in links:
        with campaign_runner.runner(link) as runner:
            for first in range(options.first, last, CHUNK):
                count = min(CHUNK, last - first)
                wrong = runner.run(first, count)
                found += wrong
                counts[link] += count
                minutes = (time.monotonic() - start) / 60
                print(f"{minutes:5.1f} min, {link}: {counts[link]} cases, {len(wrong)} of {count} wrong;", end=" ")
                print(f"go on with --links {link} --first {first + count}", flush=True)
                print("".join(f"\n{text}\n" for text in wrong), end="", flush=True)
            kinds += runner.kinds
    by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    by_link = ", ".join(f"{count} {link}" for link, count in counts.items())
    print(f"{sum(counts.values())} cases ({by_link}; {by_kind}): {len(found)} wrong")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
