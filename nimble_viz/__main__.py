"""``python -m nimble_viz``."""

import sys

if __name__ == "__main__":
    try:
        from nimble_viz.cli.command import main

        code = main()
    except KeyboardInterrupt:  # while it was imported; later ones main answers
        print("interrupted before anything was measured", file=sys.stderr)
        code = 130
    raise SystemExit(code)
