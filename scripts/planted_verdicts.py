"""Write docs/planted-verdicts.md: what an audit says of networks of which the truth is known.

``python scripts/planted_verdicts.py`` from the repository's root; ``--seeds`` for other than ten.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planted-verdicts.md"

HEADER = """\
# Planted verdicts

What an audit says of {cases} networks and credits of which the truth is known, over {seeds} seeds each: small networks
of {width} units, trained for a moment, audited on 128 examples (`tests/auditing/planted.py`). Every row is one thing
gone wrong, or nothing. The right flags are those listed and no other; `python scripts/planted_verdicts.py` writes this
page, and a slow test writes it again.

## By case

| planted | truth | status | flags | hint | right |
|---|---|---|---|---|---|
"""

MATRIX = """
## Confusion

Of {runs} audits: how often each flag was raised where it is right, and where it is not.

| flag | raised and right | raised and wrong | missed | rightly not raised |
|---|---|---|---|---|
"""


def page(seeds: int) -> str:
    """Audit every case at every seed and return the page."""
    sys.path.insert(0, str(ROOT))
    import torch

    from tests.auditing import planted

    torch.set_num_threads(1)
    runs = [(case, case.make(seed)) for case in planted.CASES for seed in range(seeds)]
    rows = []
    for case in planted.CASES:
        right = sum(planted.is_right(c, audit) for c, audit in runs if c is case)
        flags = ", ".join(f"`{key}`" for key in case.flags) or "none"
        hints = ", ".join(case.hints) or "none"
        rows.append(f"| {case.name} | {case.truth} | {case.status} | {flags} | {hints} | {right} of {seeds} |")
    keys = sorted({key for case in planted.CASES for key in case.flags} | {"self-calibration"})
    matrix = []
    for flag in keys:
        seen = Counter((flag in case.flags, flag in audit.verdict.flags) for case, audit in runs)
        cells = [seen[True, True], seen[False, True], seen[True, False], seen[False, False]]
        matrix.append(f"| `{flag}` | {' | '.join(map(str, cells))} |")
    about = {"cases": len(planted.CASES), "seeds": seeds, "width": planted.WIDTH, "runs": len(runs)}
    return HEADER.format(**about) + "\n".join(rows) + "\n" + MATRIX.format(**about) + "\n".join(matrix) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    PAGE.write_text(page(parser.parse_args().seeds))


if __name__ == "__main__":
    main()
