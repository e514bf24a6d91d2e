"""``python -m exatwin`` is the command ``exatwin``."""

from .cli import main

if __name__ == "__main__":
    main()
