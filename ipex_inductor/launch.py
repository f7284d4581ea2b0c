"""`python -m ipex_inductor.launch [options] script.py [arguments]`; see docs/guides/cpu.md."""

from ipex_inductor.cpu.launch import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
