"""``python -m holdfast.cli``: the command line where no script is installed."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
