"""`python -m ipex_inductor`: run the command `ipex-inductor`."""

from ipex_inductor.cli import app

if __name__ == "__main__":
    app(prog_name="ipex-inductor")
