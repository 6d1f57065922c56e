"""``python -m pg_queen`` is ``pg-queen``."""

from .cli import main

if __name__ == "__main__":
    main()
