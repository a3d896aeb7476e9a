"""`python -m symbiosis`: the `symbiosis` command, also from a checkout that is not installed."""

from symbiosis.cli.main import main

if __name__ == "__main__":
    main()
