"""Write one self-contained HTML page about a run folder, or about several side by side.

Usage: python tools/report.py runs/my_run [runs/other ...] [--output report.html]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dbsp_megatron.observability.html_report import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write an HTML report of run folders, finished or not.")
    parser.add_argument("folders", type=Path, nargs="+", help="run folders, such as runs/my_run")
    parser.add_argument("--output", type=Path, help="HTML file (default: report.html in the first folder)")
    options = parser.parse_args(argv)
    output = options.output or options.folders[0] / "report.html"
    try:
        write_report(options.folders, output)
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
