"""`python -m sgnb.check_recipe --config-name=...`: the pitfalls of a recipe on this machine. Exit code 1 on errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sgnb.pitfalls import check
from sgnb.recipes.arguments import add_recipe_arguments, recipe_from


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found, and return 1 if an error is among it, 2 if the recipe cannot be read, else 0."""
    parser = argparse.ArgumentParser(prog="python -m sgnb.check_recipe", description=(__doc__ or "").partition(": ")[2])
    add_recipe_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of text")
    arguments = parser.parse_intermixed_args(argv)
    try:
        findings = check(recipe_from(arguments))
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    print(findings.to_json() if arguments.json else findings)
    return 1 if findings.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
