"""``python -m tuner.cli``: the command line without its installed script."""

from tuner.cli.main import main

main()
