"""``python -m clearhead`` is the ``clearhead`` command."""

from clearhead.cli import app

if __name__ == "__main__":
    app()
