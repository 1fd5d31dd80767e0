"""``python -m hypic``."""

from hypic.cli import main

if __name__ == "__main__":
    main()
