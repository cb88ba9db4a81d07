"""Try the combinations that are named on the command line, and print the differences that break the law."""

from __future__ import annotations

import contextlib
import sys
import tempfile

from support.state_law.combinations import Combination
from support.state_law.law import problem
from support.state_law.worlds import Worlds


def main(texts: list[str]) -> int:
    combinations = [Combination.of(text) for text in texts]
    broken = 0
    with contextlib.closing(Worlds()) as worlds:
        for combination in combinations:
            with tempfile.TemporaryDirectory() as root:
                found = problem(combination, worlds, root)
            print(f"{combination.text}: {found or 'the law is kept'}")
            broken += found is not None
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
