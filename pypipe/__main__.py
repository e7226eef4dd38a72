"""`python -m pypipe` is `pypipe`."""

from pypipe.cli import main

if __name__ == "__main__":
    main(prog_name="pypipe")
