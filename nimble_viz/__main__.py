"""``python -m nimble_viz``."""

from nimble_viz.command import main

if __name__ == "__main__":
    raise SystemExit(main())
