"""`python -m featx` is the command `featx`."""

from featx.cli.entry import main

if __name__ == "__main__":
    main()
