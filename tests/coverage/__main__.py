"""Start the survey: ``python -m tests.coverage``."""

import sys

from tests.coverage.survey import main

if __name__ == "__main__":
    sys.exit(main())
