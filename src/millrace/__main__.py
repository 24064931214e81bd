"""`python -m millrace`.

Invariant: it is the same program as `millrace`, with the same exit codes.
"""

from millrace.cli.main import main

if __name__ == "__main__":
    main()
