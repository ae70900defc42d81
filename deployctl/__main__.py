"""`python -m deployctl` is `deployctl`."""

from deployctl.cli import main

if __name__ == "__main__":
    main()
