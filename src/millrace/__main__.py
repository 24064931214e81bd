"""`python -m millrace` is the same program as `millrace`."""

from millrace.cli.main import main

if __name__ == "__main__":
    main()
