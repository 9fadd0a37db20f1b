"""``python -m nimble_viz``."""

if __name__ == "__main__":
    from nimble_viz.cli.command import main

    raise SystemExit(main())
