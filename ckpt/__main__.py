"""`python -m ckpt` runs the command where its script is not on the path."""

from ckpt.cli import main

if __name__ == "__main__":
    main()
