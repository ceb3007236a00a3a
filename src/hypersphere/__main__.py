"""``python -m hypersphere``, which is also how ``torchrun`` starts the command line."""

from hypersphere.cli import main

if __name__ == "__main__":
    main()
