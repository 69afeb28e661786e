"""``python -m costmodel`` is the ``costmodel`` program."""

from costmodel.cli import main

main()
