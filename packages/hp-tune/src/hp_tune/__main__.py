"""``python -m hp_tune`` is ``hp-tune``."""

from hp_tune.cli import main

if __name__ == "__main__":
    main()
