"""`python -m pypipe` is `pypipe`."""

from pypipe.commands.cli import main

if __name__ == "__main__":
    main(prog_name="pypipe")
