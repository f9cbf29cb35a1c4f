"""``python -m geartrain``: the command line, where the ``geartrain`` script is not on the path."""

from geartrain.cli.main import main

if __name__ == "__main__":
    main()
