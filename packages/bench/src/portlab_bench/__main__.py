"""`python -m portlab_bench` is `portlab-bench`."""

from portlab_bench.cli import entry

if __name__ == "__main__":
    entry()
