"""``python -m hypic.demo``, which is ``hypic demo``."""

import sys

from hypic.cli import app

if __name__ == "__main__":
    app(["demo", *sys.argv[1:]])
