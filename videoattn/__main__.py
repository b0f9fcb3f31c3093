"""`python -m videoattn` is the command `videoattn`."""

from videoattn.command import main

if __name__ == "__main__":
    raise SystemExit(main())
