"""Entry point of ``python -m geartrain``, for where the ``geartrain`` script is not on the path."""

from geartrain.cli.main import main

if __name__ == "__main__":
    main()
