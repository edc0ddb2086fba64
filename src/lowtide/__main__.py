"""`python -m lowtide`, which is also what torchrun's `-m lowtide` starts."""

from lowtide.cli import main

if __name__ == "__main__":
    main()
